"""The step: what lasts from step to step is in `engine`, what is true for one only in `step`."""
