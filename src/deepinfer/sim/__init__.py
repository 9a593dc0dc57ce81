"""A simulated cluster: the engine's policies on stated or measured times, without a device."""
