//! Dirty trackers behind the engine's trait: KVM log, write protection.
