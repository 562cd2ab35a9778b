"""What runs on a host: the launcher's process there, torch's agent, and the workers' frame."""
