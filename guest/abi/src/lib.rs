//! What the bare-metal guest shares with the host: workloads, stamps, the statistics page.
