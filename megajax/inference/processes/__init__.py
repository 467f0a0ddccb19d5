"""Engines of several processes: process 0 schedules, and all run its operations on their devices."""
