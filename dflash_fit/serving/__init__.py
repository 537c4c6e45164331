"""Code that an export carries with it.  Nothing here is imported: it is copied as it stands."""
