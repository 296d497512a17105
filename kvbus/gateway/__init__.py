"""The HTTP door: transfers, caches and health of instances, for programs that speak HTTP rather than the bus."""
