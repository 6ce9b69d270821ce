"""The datasets, one file each: functions of settings, count and seed alone."""
