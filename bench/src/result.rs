//! What every side of a migration comparison reports, whoever ran it.

use std::time::Duration;

/// One migration, as its own side measured it. All sides fill this in by the same definitions.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MigrationResult {
    /// From the command until the source knows that it is done.
    pub total: Duration,
    /// How long the guest ran nowhere, as the migrating program reports it.
    pub downtime: Duration,
    /// Guest memory that was moved as it is, in bytes: raw pages, every time that they were sent. Zero
    /// pages, headers and checksums do not count.
    pub data_bytes: u64,
    /// Everything that went over the network, in bytes. None: not known.
    pub wire_bytes: Option<u64>,
    /// Times that memory was gone over. None: not known.
    pub passes: Option<u64>,
    /// Processor time of the source process from the command until it was done, without its vCPU threads
    /// ([`crate::cpu::CpuMeter`]).
    pub cpu_source: Duration,
    /// The same of the destination process.
    pub cpu_destination: Duration,
    /// Writes a second, all vCPUs, before the migration. None: the guest writes nothing.
    pub writes_before: Option<f64>,
    /// The same from the command until it was done, downtime included.
    pub writes_during: Option<f64>,
    /// The same on the destination afterwards.
    pub writes_after: Option<f64>,
    /// The longest that a vCPU found itself stopped, from the command until a moment after the end. None: not known.
    pub stall_max: Option<Duration>,
}

impl MigrationResult {
    /// Guest memory moved, in 10^9 bytes.
    #[expect(clippy::cast_precision_loss, reason = "a byte count below 2^53")]
    pub fn gbytes(&self) -> f64 {
        self.data_bytes as f64 / 1e9
    }

    /// Guest memory moved by total time, in 10^9 bytes per second.
    pub fn gbytes_per_s(&self) -> f64 {
        self.gbytes() / self.total.as_secs_f64()
    }

    /// Processor time of both processes by guest memory moved, in milliseconds per 10^9 bytes.
    pub fn cpu_ms_per_gb(&self) -> f64 {
        (self.cpu_source + self.cpu_destination).as_secs_f64() * 1e3 / self.gbytes()
    }

    /// The share of its speed that the guest kept during the migration. None: it writes nothing.
    pub fn guest_speed_kept(&self) -> Option<f64> {
        Some(self.writes_during? / self.writes_before?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_derived_figures() {
        let result = MigrationResult {
            total: Duration::from_millis(500),
            data_bytes: 2_000_000_000,
            cpu_source: Duration::from_millis(300),
            cpu_destination: Duration::from_millis(700),
            writes_before: Some(100.0),
            writes_during: Some(90.0),
            ..MigrationResult::default()
        };
        assert_eq!(result.gbytes_per_s(), 4.0);
        assert_eq!(result.cpu_ms_per_gb(), 500.0);
        assert_eq!(result.guest_speed_kept(), Some(0.9));
        assert_eq!(MigrationResult::default().guest_speed_kept(), None);
    }
}
