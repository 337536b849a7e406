"""VoxCPM: text to speech by continuous latents, a diffusion loop inside each step."""
