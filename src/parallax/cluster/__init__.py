"""Who runs where: environment, topology, process groups, heartbeats, and the step file."""
