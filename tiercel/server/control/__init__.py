"""Changes and reports while the daemon runs: the settings in force, and notifications to systemd."""
