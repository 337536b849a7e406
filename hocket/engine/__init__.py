"""Request life cycle, workers, connectors and launchers. `Engine` and `AsyncEngine` are the way in."""
