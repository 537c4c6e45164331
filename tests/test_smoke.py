def test_a_tiny_cache_builds(tiny_cache):
    from dflash_cache.store import CacheReader

    assert len(CacheReader(tiny_cache).located) == 40
