"""What changes or is reported while the daemon runs: the settings in force and the service manager."""
