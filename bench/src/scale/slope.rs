//! Slopes of a figure over the points of a curve.

/// Growth of a figure with the position on the axis.
///
/// All slopes are least-squares fits to the medians of the points.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Slope {
    /// Change of the figure for each unit of the axis: the slope of a straight line.
    pub(super) per_unit: f64,
    /// Change of the figure for each doubling of the axis: the slope over the base-2 logarithm of
    /// the position.
    pub(super) per_doubling: f64,
    /// Exponent `k` of the power law `figure ~ position^k`: 0 if the figure does not depend on the
    /// axis, 1 if it is proportional to the axis. `None` if a point is not positive.
    pub(super) exponent: Option<f64>,
}

impl Slope {
    /// Returns the slopes of `points`, each a position on the axis and a figure. `None` if fewer
    /// than two positions differ.
    ///
    /// # Panics
    ///
    /// Panics if a position is not positive.
    pub(super) fn of(points: &[(f64, f64)]) -> Option<Self> {
        assert!(points.iter().all(|(at, _)| *at > 0.0), "an axis begins above zero: {points:?}");
        let positive = points.iter().all(|(_, figure)| *figure > 0.0);
        let logarithms = || fit(points.iter().map(|(at, figure)| (at.log2(), figure.log2())));
        Some(Self {
            per_unit: fit(points.iter().copied())?,
            per_doubling: fit(points.iter().map(|(at, figure)| (at.log2(), *figure)))?,
            exponent: if positive { logarithms() } else { None },
        })
    }
}

/// Returns the slope of the straight line with the least squares, or `None` if it is not finite.
fn fit(points: impl Iterator<Item = (f64, f64)> + Clone) -> Option<f64> {
    let (count, sum_x, sum_y) =
        points.clone().fold((0.0, 0.0, 0.0), |(count, x, y), point| (count + 1.0, x + point.0, y + point.1));
    let (mean_x, mean_y) = (sum_x / count, sum_y / count);
    let (square, product) = points.fold((0.0, 0.0), |(square, product), (x, y)| {
        (square + (x - mean_x) * (x - mean_x), product + (x - mean_x) * (y - mean_y))
    });
    let slope: f64 = product / square;
    slope.is_finite().then_some(slope)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: f64, want: f64) {
        assert!((got - want).abs() < 1e-9, "{got}, want {want}");
    }

    #[test]
    fn proportional_figure_has_exponent_one() {
        let slope = Slope::of(&[(1.0, 3.0), (4.0, 12.0), (64.0, 192.0)]).unwrap();
        close(slope.per_unit, 3.0);
        close(slope.exponent.unwrap(), 1.0);
    }

    #[test]
    fn figure_that_grows_with_each_doubling_has_that_slope() {
        let slope = Slope::of(&[(1.0, 10.0), (2.0, 12.0), (4.0, 14.0), (8.0, 16.0)]).unwrap();
        close(slope.per_doubling, 2.0);
        assert!(slope.exponent.unwrap() < 0.3);
    }

    #[test]
    fn constant_figure_has_no_slope() {
        let slope = Slope::of(&[(1.0, 7.0), (64.0, 7.0), (4096.0, 7.0)]).unwrap();
        assert_eq!(slope, Slope { per_unit: 0.0, per_doubling: 0.0, exponent: Some(0.0) });
    }

    #[test]
    fn figure_of_zero_has_no_exponent() {
        let slope = Slope::of(&[(1.0, 0.0), (2.0, 1.0)]).unwrap();
        assert_eq!((slope.per_unit, slope.exponent), (1.0, None));
    }

    #[test]
    fn one_position_has_no_slope() {
        assert_eq!(Slope::of(&[]), None);
        assert_eq!(Slope::of(&[(1.0, 2.0)]), None);
        assert_eq!(Slope::of(&[(1.0, 2.0), (1.0, 3.0)]), None);
    }
}
