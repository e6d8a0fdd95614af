//! The bare-metal guest's ELF image, built by this crate's build script.
