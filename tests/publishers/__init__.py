"""Programs that publish to a pool as other systems do."""
