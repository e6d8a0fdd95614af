//! Tables and pages of single benches. A bench without a module uses the columns that its cases
//! have.

pub mod branch;
pub mod codec;
pub mod density;
pub mod free_page;
pub mod migrate;
pub mod postcopy;
pub mod reaper;
pub mod reaper_traces;
pub mod rtt;
pub mod scale;
pub mod scan;
pub mod snapshot;
pub mod stalls;
pub mod upgrade;
