"""Stage two: train a DFlash drafter from the cache, measure it, and export it for serving."""
