//! Median and spread of a few repeats.
//!
//! Within each round, the compared programs are measured in turn, and a comparison is a ratio
//! within a round. Therefore drift on the host (caches, other load, clock frequency) affects all
//! programs alike.

/// Median and extremes of some repeats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// Median value. For an even number of repeats, the mean of the two middle values.
    pub median: f64,
    /// Smallest value.
    pub min: f64,
    /// Largest value.
    pub max: f64,
    /// Number of repeats.
    pub repeats: usize,
}

impl Spread {
    /// Returns the spread of the finite values among `values`, or `None` if there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len().is_multiple_of(2) {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        } else {
            sorted[middle]
        };
        Some(Spread { median, min, max, repeats: sorted.len() })
    }

    /// Returns the spread of the ratios of `ours` to `theirs`, computed round by round. Rounds with
    /// a missing value are ignored. Returns `None` if no round is left.
    pub fn of_ratios(ours: &[Option<f64>], theirs: &[Option<f64>]) -> Option<Self> {
        Self::of(ours.iter().zip(theirs).filter_map(|(a, b)| Some((*a)? / (*b)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_even_and_no_values() {
        let odd = Spread::of([3.0, 1.0, 2.0]).unwrap();
        assert_eq!((odd.median, odd.min, odd.max, odd.repeats), (2.0, 1.0, 3.0, 3));
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
        assert_eq!(Spread::of([f64::NAN, 7.0, f64::INFINITY]).unwrap().repeats, 1);
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        // The host became twice as slow after the first round, and the ratio stays the same.
        let ratios =
            Spread::of_ratios(&[Some(10.0), Some(5.0), None], &[Some(5.0), Some(2.5), Some(1.0)]).unwrap();
        assert_eq!((ratios.min, ratios.max, ratios.repeats), (2.0, 2.0, 2));
        assert_eq!(Spread::of_ratios(&[Some(1.0)], &[Some(0.0)]), None);
    }
}
