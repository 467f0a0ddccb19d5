"""What a process does about faults: signals, beats, watchdog, drills."""
