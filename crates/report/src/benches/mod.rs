//! Tables and pages of single benches. A bench that is not listed here is shown by the columns that
//! its cases have.

pub mod density;
pub mod free_page;
pub mod migrate;
pub mod postcopy;
pub mod reaper;
pub mod rtt;
pub mod scan;
