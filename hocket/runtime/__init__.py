"""Slots, KV blocks, schedulers, output ring and playback clock: what runs a program for many requests."""
