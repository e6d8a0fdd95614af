//! Result of one migration in a comparison, by the same definitions for all sides.

use crate::cases::Figures;
use std::time::Duration;

/// Figures of one migration as its own side measured it. All sides use the same definitions.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MigrationResult {
    /// Time from the command until the source knows the end of the migration.
    pub total: Duration,
    /// Downtime as the migrating program reports it.
    pub downtime: Duration,
    /// Guest memory that was sent as raw pages, in bytes. A page counts each time that it was sent.
    /// Zero pages, headers and checksums do not count.
    pub data_bytes: u64,
    /// Bytes that were sent over the network. `None` if unknown.
    pub wire_bytes: Option<u64>,
    /// Number of pages that were sent as differences from an earlier version. `None` if unknown.
    pub delta_pages: Option<u64>,
    /// Number of pages that were sent compressed. `None` if unknown.
    pub compressed_pages: Option<u64>,
    /// Number of passes over the memory. `None` if unknown.
    pub passes: Option<u64>,
    /// Processor time of the source process from the command until the end, without its vCPU
    /// threads ([`crate::cpu::CpuMeter`]).
    pub cpu_source: Duration,
    /// Processor time of the target process from the command until the end, without its vCPU
    /// threads.
    pub cpu_destination: Duration,
    /// Writes per second of all vCPUs before the migration. `None` if the guest writes nothing.
    pub writes_before: Option<f64>,
    /// Writes per second of all vCPUs from the command until the end, including the downtime.
    pub writes_during: Option<f64>,
    /// Writes per second of all vCPUs on the target afterwards.
    pub writes_after: Option<f64>,
    /// Longest stall of a vCPU from the command until shortly after the end. `None` if unknown.
    pub stall_max: Option<Duration>,
    /// Guest memory of the target that is resident after the migration, in bytes. `None` if
    /// unknown.
    pub target_resident: Option<u64>,
}

impl MigrationResult {
    /// Returns the times of the migration, in milliseconds.
    pub(crate) fn times(&self) -> Figures {
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        Figures::from([
            ("total_ms", millis(self.total)),
            ("downtime_ms", millis(self.downtime)),
            ("source_cpu_ms", millis(self.cpu_source)),
            ("target_cpu_ms", millis(self.cpu_destination)),
        ])
    }

    /// Returns the guest memory that was moved, in 10^9 bytes.
    #[expect(clippy::cast_precision_loss, reason = "a byte count below 2^53")]
    pub fn gbytes(&self) -> f64 {
        self.data_bytes as f64 / 1e9
    }

    /// Returns the guest memory that was moved divided by the total time, in 10^9 bytes per second.
    pub fn gbytes_per_s(&self) -> f64 {
        self.gbytes() / self.total.as_secs_f64()
    }

    /// Returns the processor time of both processes divided by the guest memory moved, in
    /// milliseconds per 10^9 bytes.
    pub fn cpu_ms_per_gb(&self) -> f64 {
        (self.cpu_source + self.cpu_destination).as_secs_f64() * 1e3 / self.gbytes()
    }

    /// Returns the share of its speed that the guest kept during the migration, or `None` if the
    /// guest writes nothing.
    pub fn guest_speed_kept(&self) -> Option<f64> {
        Some(self.writes_during? / self.writes_before?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_figures_follow_from_the_measured_ones() {
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
