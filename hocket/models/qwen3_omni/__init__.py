"""Qwen3-Omni: text, sound, pictures and films in; text and speech out, the speech made while the text is."""
