//! Wrong usage: options that cannot be parsed, or that do not fit together. The exit status is
//! [`STATUS`].

use crate::output;
use std::fmt;
use vmferry_confine::{ConfineError, JailError};
use vmferry_dirty::TrackerError;
use vmferry_sys::tap::TapError;

/// Exit status of wrong usage.
pub(crate) const STATUS: u8 = 2;

/// Error of options that do not fit together.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Returns [`Usage`] from a function, with a message as in `format!`.
macro_rules! wrong_usage {
    ($($words:tt)*) => {
        return Err(crate::usage::Usage(format!($($words)*)).into())
    };
}
pub(crate) use wrong_usage;

/// Returns whether `error` is wrong usage: no state of the host makes these options right.
pub(crate) fn is_wrong(error: &anyhow::Error) -> bool {
    use vmferry_vmm::Error as VmmError;
    error.is::<Usage>()
        || matches!(error.downcast_ref(), Some(VmmError::Options(_) | VmmError::Tap(TapError::Name(_))))
        || matches!(error.downcast_ref(), Some(vmferry_process::Error::Options(_)))
        || matches!(error.downcast_ref(), Some(TrackerError::Windows { .. }))
        || matches!(
            error.downcast_ref(),
            Some(ConfineError::Jail(JailError::StaysRoot | JailError::Upwards(_)))
        )
}

/// Prints clap's error, help or version, and ends the process. On a terminal, lines of errors are
/// broken between words, which clap does for help only.
pub(crate) fn refuse(error: &clap::Error) -> ! {
    if let Some(columns) = output::columns(true).filter(|_| error.use_stderr()) {
        let text = error.render().to_string();
        if text.lines().any(|line| line.chars().count() > columns) {
            for line in text.lines() {
                eprintln!("{}", output::fold(line, columns, 2));
            }
            std::process::exit(error.exit_code());
        }
    }
    error.exit()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn wrong_options_are_told_from_failures() {
        let options = vmferry_vmm::Error::Options("4096 bytes of memory are not possible".into());
        let jail = ConfineError::from(JailError::StaysRoot);
        for wrong in [
            anyhow::Error::new(Usage("--a and --b".into())),
            options.into(),
            jail.into(),
            anyhow::Error::from(vmferry_vmm::Error::from(TapError::Name(String::new()))).context("x"),
        ] {
            assert!(is_wrong(&wrong), "{wrong:#}");
        }
        let host = Err::<(), _>(vmferry_vmm::Error::NoKvm).context("x").unwrap_err();
        assert!(!is_wrong(&host) && !is_wrong(&ConfineError::from(JailError::NotRoot).into()));
    }

    #[test]
    fn macro_returns_the_error() {
        fn refused(option: &str) -> anyhow::Result<()> {
            wrong_usage!("omit {option}");
        }
        assert!(refused("--x").unwrap_err().is::<Usage>());
    }
}
