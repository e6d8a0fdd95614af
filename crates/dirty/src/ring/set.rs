//! Sets of rings that are harvested together.

use crate::TrackerError;
use std::ops::Range;

/// Rings to harvest: each once, in ascending order.
///
/// A harvest holds the lock of each of its rings until the end. A ring that occurs twice would wait
/// for itself, and two harvests in different orders could wait for each other. No value of this
/// type has a ring twice, or another order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RingSet(Members);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Members {
    Range(Range<usize>),
    /// Strictly ascending.
    List(Vec<usize>),
}

impl RingSet {
    /// Returns all rings of a VM with `rings` rings.
    pub(crate) fn all(rings: usize) -> Self {
        Self(Members::Range(0..rings))
    }

    pub(crate) fn one(ring: usize) -> Self {
        Self(Members::Range(ring..ring + 1))
    }

    /// Returns the rings that occur in `named`, of a VM with `rings` rings.
    ///
    /// # Errors
    /// Returns [`TrackerError::NoRing`] if a ring does not exist.
    pub(crate) fn named(named: &[usize], rings: usize) -> Result<Self, TrackerError> {
        if let Some(&vcpu) = named.iter().find(|ring| **ring >= rings) {
            return Err(TrackerError::NoRing { vcpu, rings });
        }
        let mut list = named.to_vec();
        list.sort_unstable();
        list.dedup();
        Ok(Self(Members::List(list)))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        let (range, list) = match &self.0 {
            Members::Range(range) => (range.clone(), &[][..]),
            Members::List(list) => (0..0, &list[..]),
        };
        range.chain(list.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(named: &[usize]) -> Vec<usize> {
        RingSet::named(named, 4).unwrap().iter().collect()
    }

    #[test]
    fn each_ring_occurs_once_in_ascending_order() {
        assert_eq!(members(&[3, 1, 3, 0, 1]), [0, 1, 3]);
        assert_eq!(members(&[]), []);
        assert_eq!(RingSet::all(3).iter().collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(RingSet::one(2).iter().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn ring_that_does_not_exist_is_refused() {
        let error = RingSet::named(&[1, 4], 4).unwrap_err();
        assert!(matches!(error, TrackerError::NoRing { vcpu: 4, rings: 4 }), "{error}");
    }
}
