"""Qwen3-TTS at 12 Hz: Base, CustomVoice and VoiceDesign, 0.6B and 1.7B."""
