"""Layers shared by families. Functions over tensors and frozen weights; nothing here knows a checkpoint."""
