//! The live-migration engine: source, target, channels, policy. Knows no VMM.
