//! The raw ioctls that no crate wraps: KVM dirty log, userfaultfd, PAGEMAP_SCAN.
