"""Formulas for the time, memory and traffic of a train step."""
