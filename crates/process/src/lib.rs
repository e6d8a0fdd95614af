//! The guest that needs no KVM: threads writing to memory tracked by write protection.
