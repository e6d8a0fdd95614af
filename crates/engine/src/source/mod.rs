mod policy;
pub(crate) mod session;
pub use session::{OnTimeout, Outcome, Settings, Verification};
