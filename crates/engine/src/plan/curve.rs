//! Curve of the number of pages that a guest dirties within a given time. It is fitted to a few
//! measured windows, and extrapolated beyond them.
//!
//! The number of pages that a pass leaves dirty depends on *which* pages it sends: the guest writes
//! hot pages again at once, and cold pages hardly ever. Because a single curve does not show this,
//! the curve is split into classes of pages that are written in the same way. A guest that writes
//! at random, with any skew, is a sum of classes `n (1 - exp(-t/tau))`. A guest that writes
//! sequentially through its memory is one class `min(n, r t)`.

use serde::{Deserialize, Serialize};

/// Point of the curve: the number of pages that had been written at least once by the end of a
/// window.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CurvePoint {
    /// Length of the window in seconds. The window begins when all pages have been protected.
    pub window_s: f64,
    /// Number of pages.
    pub pages: f64,
}

/// Pattern in which the pages of a class are written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kernel {
    /// Each page is written at random times. The value is the mean number of writes per second.
    Random(f64),
    /// The pages are written one after the other, in repeated rounds. The value is the number of
    /// rounds per second.
    Cyclic(f64),
}

impl Kernel {
    /// Returns the share of the pages that are written at least once within `time` seconds.
    pub(crate) fn within(self, time: f64) -> f64 {
        match self {
            Self::Random(often) => -(-often * time).exp_m1(),
            Self::Cyclic(often) => (often * time).clamp(0.0, 1.0),
        }
    }

    /// Returns the mean of [`within`](Self::within) over the times from `from` to `to`.
    pub(crate) fn mean_within(self, from: f64, to: f64) -> f64 {
        if to - from < 1e-9 {
            return self.within(to);
        }
        match self {
            Self::Random(often) => {
                let part = ((-often * from).exp() - (-often * to).exp()) / (often * (to - from)).max(1e-12);
                (1.0 - part).clamp(0.0, 1.0)
            }
            Self::Cyclic(often) => {
                // The integral of min(1, often t).
                let area = |t: f64| {
                    let full = 1.0 / often.max(1e-12);
                    if t <= full { often * t * t / 2.0 } else { full / 2.0 + (t - full) }
                };
                ((area(to) - area(from)) / (to - from)).clamp(0.0, 1.0)
            }
        }
    }

    /// Returns the share of pages that a pass of `window` seconds leaves dirty.
    ///
    /// The pass reads the pages one after the other, from the share `from` to the share `to` of its
    /// time. Each page is protected `lead` seconds before it is read, but not before the start of
    /// the pass.
    pub(crate) fn left_by_turns(self, (from, to): (f64, f64), window: f64, lead: f64) -> f64 {
        let early = (lead / window.max(1e-9)).clamp(from, to);
        let since = |turn: f64| (window * (1.0 - turn) + lead).min(window);
        let whole = (to - from).max(1e-12);
        let (at_once, in_turn) = ((early - from) / whole, (to - early) / whole);
        at_once * self.within(window) + in_turn * self.mean_within(since(to), since(early))
    }

    /// Returns the kernel of a guest that writes the same pages `factor` times as often.
    pub(crate) fn faster(self, factor: f64) -> Self {
        match self {
            Self::Random(often) => Self::Random(often * factor),
            Self::Cyclic(often) => Self::Cyclic(often * factor),
        }
    }
}

/// Class of pages that are written in the same way.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Class {
    /// Number of pages.
    pub(crate) pages: f64,
    pub(crate) kernel: Kernel,
}

/// Writes of a guest, as a sum of classes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Curve {
    pub(crate) classes: Vec<Class>,
    /// Largest relative deviation of the fitted curve from the measured points.
    pub(crate) misfit: f64,
    /// Longest measured window in seconds. Values beyond it are extrapolated.
    pub(crate) known_s: f64,
}

/// Mean length of the runs of pages in a short window from which the guest counts as writing
/// sequentially.
const RUN_OF_A_WALK: f64 = 32.0;

impl Curve {
    /// Fits a curve to `points`, whose windows must be in ascending order, for a guest with `most`
    /// pages. `run` is the mean length of the runs of adjacent pages in a short window.
    pub(crate) fn fit(points: &[CurvePoint], most: f64, run: f64) -> Self {
        let known_s = points.last().map_or(0.0, |point| point.window_s);
        let random = random(points, most);
        let misfit_random = misfit(&random, points);
        let walk = walk(points, most);
        let misfit_walk = misfit(&walk, points);
        let walks = run >= RUN_OF_A_WALK && misfit_walk < 0.1;
        let (classes, misfit) = if walks { (walk, misfit_walk) } else { (random, misfit_random) };
        Self { classes, misfit, known_s }
    }

    /// Returns the number of pages that are written within `time` seconds.
    pub(crate) fn pages(&self, time: f64) -> f64 {
        total(&self.classes, time)
    }

    /// Returns the curve of a guest that runs `factor` times as fast.
    pub(crate) fn faster(&self, factor: f64) -> Self {
        let faster = |class: &Class| Class { kernel: class.kernel.faster(factor), ..*class };
        Self { classes: self.classes.iter().map(faster).collect(), ..*self }
    }
}

fn total(classes: &[Class], time: f64) -> f64 {
    classes.iter().map(|class| class.pages * class.kernel.within(time)).sum()
}

fn misfit(classes: &[Class], points: &[CurvePoint]) -> f64 {
    let off =
        |point: &CurvePoint| (total(classes, point.window_s) - point.pages).abs() / point.pages.max(64.0);
    points.iter().map(off).fold(0.0, f64::max)
}

/// Fits `min(n, r t)`. For each possible position of the knee, the rate follows from the points
/// before the knee. The position with the smallest misfit is used.
fn walk(points: &[CurvePoint], most: f64) -> Vec<Class> {
    let last = points.last().map_or(0.0, |point| point.pages);
    let candidates = (0..points.len()).map(|knee| {
        let before = &points[..=knee];
        let rate = before.iter().map(|p| p.pages * p.window_s).sum::<f64>()
            / before.iter().map(|p| p.window_s * p.window_s).sum::<f64>().max(1e-12);
        let size = if knee + 1 == points.len() { most } else { last }.max(1.0);
        vec![Class { pages: size, kernel: Kernel::Cyclic(rate / size) }]
    });
    // If two positions fit equally well, the later one is used. Therefore the line continues unless
    // the windows show that it ends.
    let rounded = |classes: &[Class]| (misfit(classes, points) * 100.0).round();
    candidates.rev().min_by(|a, b| rounded(a).total_cmp(&rounded(b))).unwrap_or_default()
}

/// Fits a sum of random classes, whose rates are on a logarithmic grid. The number of pages of each
/// class is found by non-negative least squares with coordinate descent. The problem is convex and
/// small, and need not be solved exactly.
fn random(points: &[CurvePoint], most: f64) -> Vec<Class> {
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return Vec::new() };
    let (slowest, fastest) = (0.02 / last.window_s, 8.0 / first.window_s);
    const GRID: usize = 40;
    let rate = |at: usize| slowest * (fastest / slowest).powf(at as f64 / (GRID - 1) as f64);
    let columns: Vec<Vec<f64>> = (0..GRID)
        .map(|at| points.iter().map(|point| Kernel::Random(rate(at)).within(point.window_s)).collect())
        .collect();
    // The relative error is minimized, so that a short window has the same weight as a long one.
    let weights: Vec<f64> = points.iter().map(|point| point.pages.max(64.0).powi(-2)).collect();
    let mut sizes = vec![0.0; GRID];
    let mut rest: Vec<f64> = points.iter().map(|point| point.pages).collect();
    for _ in 0..3000 {
        for (column, size) in columns.iter().zip(&mut sizes) {
            let along = |values: &[f64]| {
                column.iter().zip(values).zip(&weights).map(|((c, v), w)| c * v * w).sum::<f64>()
            };
            let step = along(&rest) / along(column).max(1e-30);
            let next = (*size + step).clamp(0.0, most);
            let change = next - *size;
            *size = next;
            rest.iter_mut().zip(column).for_each(|(r, c)| *r -= change * c);
        }
    }
    let mut classes: Vec<Class> = (0..GRID)
        .filter(|at| sizes[*at] > 0.01)
        .map(|at| Class { pages: sizes[at], kernel: Kernel::Random(rate(at)) })
        .collect();
    fit_into(&mut classes, most, last.window_s);
    classes
}

/// Replaces the slow classes by one class that fits into memory and has the same initial rate, if
/// the classes together have more pages than `most`. The windows were too short to measure the
/// number of pages of a slow class.
fn fit_into(classes: &mut Vec<Class>, most: f64, seen: f64) {
    let sum = |classes: &[Class]| classes.iter().map(|class| class.pages).sum::<f64>();
    if sum(classes) <= most {
        return;
    }
    let often = |class: &Class| match class.kernel {
        Kernel::Random(often) | Kernel::Cyclic(often) => often,
    };
    let (slow, quick): (Vec<Class>, Vec<Class>) = classes.iter().partition(|class| often(class) * seen < 0.7);
    let slope: f64 = slow.iter().map(|class| class.pages * often(class)).sum();
    let pages = (most - sum(&quick)).max(most * 0.01);
    *classes = quick;
    classes.insert(0, Class { pages, kernel: Kernel::Random(slope / pages) });
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOWS: [f64; 7] = [0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6];

    fn points(curve: impl Fn(f64) -> f64) -> Vec<CurvePoint> {
        WINDOWS.iter().map(|window_s| CurvePoint { window_s: *window_s, pages: curve(*window_s) }).collect()
    }

    fn near(got: f64, want: f64, share: f64) {
        assert!((got - want).abs() <= want.abs() * share, "{got} and not {want}");
    }

    #[test]
    fn fit_of_uniform_writes_saturates_like_the_guest() {
        let uniform = |t: f64| 16_384.0 * (1.0 - (-30_000.0 / 16_384.0 * t).exp());
        let curve = Curve::fit(&points(uniform), 65_536.0, 2.0);
        for time in [0.03, 0.3, 1.0, 3.0, 10.0] {
            near(curve.pages(time), uniform(time), 0.05);
        }
    }

    #[test]
    fn fit_of_skewed_writes_has_hot_pages_and_a_tail() {
        let weight = |k: u32| f64::from(k).powf(-0.99);
        let sum: f64 = (1..=20_000).map(weight).sum();
        let zipf = |t: f64| (1..=20_000).map(|k| -(-20_000.0 * weight(k) / sum * t).exp_m1()).sum::<f64>();
        let curve = Curve::fit(&points(zipf), 65_536.0, 2.0);
        for time in [0.03, 0.3, 1.0, 3.0] {
            near(curve.pages(time), zipf(time), 0.06);
        }
        assert!(curve.classes.len() > 2, "{curve:?}");
    }

    #[test]
    fn fit_of_sequential_writes_is_a_line_with_an_end() {
        let walk = |t: f64| (30_000.0 * t).min(20_000.0);
        let curve = Curve::fit(&points(walk), 65_536.0, 500.0);
        assert!(matches!(curve.classes[..], [Class { kernel: Kernel::Cyclic(_), .. }]));
        near(curve.pages(0.5), 15_000.0, 0.02);
        near(curve.pages(5.0), 20_000.0, 0.02);
        // A line whose end was not measured continues.
        let curve = Curve::fit(&points(|t| 10_000.0 * t), 1e6, 500.0);
        near(curve.pages(5.0), 50_000.0, 0.02);
    }

    #[test]
    fn fit_of_no_writes_and_of_no_points_is_zero() {
        assert!(Curve::fit(&points(|_| 0.0), 1e5, 1.0).pages(100.0) < 1.0);
        assert_eq!(Curve::fit(&[], 1e5, 1.0).pages(1.0), 0.0);
    }

    #[test]
    fn fit_has_no_more_pages_than_the_guest() {
        let curve = Curve::fit(&points(|t| 40_000.0 * t), 70_000.0, 1.0);
        assert!(curve.pages(1e6) <= 70_001.0 * 1.02, "{}", curve.pages(1e6));
        near(curve.pages(0.4), 16_000.0, 0.15);
    }

    #[test]
    fn pages_with_an_early_turn_are_protected_when_the_pass_begins() {
        for kernel in [Kernel::Random(2.0), Kernel::Cyclic(0.8)] {
            for (from, to) in [(0.0, 1.0), (0.3, 0.6), (0.0, 0.1), (0.1, 0.9)] {
                let (window, lead, steps) = (0.9, 0.2, 10_000);
                let at = |i: i32| {
                    let turn = from + (to - from) * (f64::from(i) + 0.5) / f64::from(steps);
                    kernel.within(window - (turn * window - lead).max(0.0))
                };
                let mean = (0..steps).map(at).sum::<f64>() / f64::from(steps);
                let got = kernel.left_by_turns((from, to), window, lead);
                assert!((got - mean).abs() < 1e-3, "{kernel:?} {from} {to}: {got} and not {mean}");
            }
        }
    }

    #[test]
    fn mean_within_agrees_with_numerical_integration() {
        for kernel in [Kernel::Random(2.0), Kernel::Cyclic(2.0)] {
            let (from, to) = (0.2, 1.3);
            let steps = 10_000;
            let at = |i: i32| kernel.within(from + (to - from) * (f64::from(i) + 0.5) / f64::from(steps));
            let mean = (0..steps).map(at).sum::<f64>() / f64::from(steps);
            assert!((kernel.mean_within(from, to) - mean).abs() < 1e-4, "{kernel:?}");
        }
    }
}
