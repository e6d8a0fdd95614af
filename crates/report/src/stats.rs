//! Median and spread of few repeats.
//!
//! Sides are measured in turn within each round, and a comparison is a ratio within a round: what
//! drifts on the host (caches, neighbours, clock frequency) then hits both sides alike.

/// What some repeats came to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The middle value; the mean of the two middle ones for an even number.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// How many there were.
    pub repeats: usize,
}

impl Spread {
    /// Of these values; those that are not finite are left out. None when nothing is left.
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

    /// Of the ratios of `ours` to `theirs`, round by round. Rounds in which a side is missing do not count.
    pub fn of_ratios(ours: &[Option<f64>], theirs: &[Option<f64>]) -> Option<Self> {
        Self::of(ours.iter().zip(theirs).filter_map(|(a, b)| Some((*a)? / (*b)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_even_and_nothing() {
        let odd = Spread::of([3.0, 1.0, 2.0]).unwrap();
        assert_eq!((odd.median, odd.min, odd.max, odd.repeats), (2.0, 1.0, 3.0, 3));
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
        assert_eq!(Spread::of([f64::NAN, 7.0, f64::INFINITY]).unwrap().repeats, 1);
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        // The host got twice as slow after the first round; the ratio stays what it is.
        let ratios =
            Spread::of_ratios(&[Some(10.0), Some(5.0), None], &[Some(5.0), Some(2.5), Some(1.0)]).unwrap();
        assert_eq!((ratios.min, ratios.max, ratios.repeats), (2.0, 2.0, 2));
        assert_eq!(Spread::of_ratios(&[Some(1.0)], &[Some(0.0)]), None);
    }
}
