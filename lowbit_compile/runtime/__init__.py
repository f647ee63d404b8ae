"""State that low precision needs between steps: amax windows and rounding seeds, advanced once per optimizer step."""
