//! Guest memory: typed addresses, regions, zero test, page digests, copies.
