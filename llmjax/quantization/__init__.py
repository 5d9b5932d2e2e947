"""Turning a model into an INT8 one, and proving that it is good enough. Knows no scheduling, server or pipeline."""
