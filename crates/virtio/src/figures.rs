//! Counters of a device.

use std::sync::atomic::{AtomicU64, Ordering};

/// Defines a type of counters, and a type of their values at one moment: `figures!(Metrics, pub
/// Figures, "what they count"; names)`.
macro_rules! figures {
    ($metrics:ident, $figures:ident, $doc:literal; $($(#[$meta:meta])* $name:ident,)*) => {
        #[derive(Debug, Default)]
        pub(super) struct $metrics {
            $(pub(super) $name: std::sync::atomic::AtomicU64,)*
        }

        #[doc = $doc]
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
        #[non_exhaustive]
        pub struct $figures {
            $($(#[$meta])* pub $name: u64,)*
        }

        impl $metrics {
            pub(super) fn figures(&self) -> $figures {
                $figures { $($name: self.$name.load(std::sync::atomic::Ordering::Relaxed),)* }
            }
        }
    };
}

pub(crate) use figures;

pub(crate) fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}
