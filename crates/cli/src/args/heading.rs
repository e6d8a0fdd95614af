//! Headings of the options in the help of a command.

pub(crate) const CONFINEMENT: &str = "Confinement";
pub(crate) const DECISION: &str = "Decision";
pub(crate) const DEVICES: &str = "Devices";
pub(crate) const ENCRYPTION: &str = "Encryption";
pub(crate) const GUEST: &str = "Guest";
pub(crate) const HOOKS: &str = "Hooks";
pub(crate) const MEASUREMENT: &str = "Measurement";
pub(crate) const MEMORY: &str = "Memory";
pub(crate) const METRICS: &str = "Metrics";
pub(crate) const MIGRATION: &str = "Migration";
pub(crate) const POSTCOPY: &str = "Postcopy";
pub(crate) const PREDICTION: &str = "Prediction";
pub(crate) const TRACKING: &str = "Dirty tracking";
pub(crate) const TRANSFER: &str = "Transfer";
