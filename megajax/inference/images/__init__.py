"""Images within prompts: how they are read, where they stand, and their states on the device."""
