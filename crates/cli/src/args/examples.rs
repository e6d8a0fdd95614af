//! Examples at the end of the long help of each command. A test parses each line that begins with
//! `vmferry`.

/// Returns the section with these lines, under a heading in the style of clap's headings.
macro_rules! examples {
    ($($line:literal)+) => {
        concat!("\x1b[1m\x1b[4mExamples:\x1b[0m" $(, "\n  ", $line)+)
    };
}

pub(super) const ALL: &str = examples! {
    "# Move a loaded guest between two processes of this host"
    "vmferry demo"
    "# Start a guest, and move it to a target that waits for it"
    "vmferry run --memory 4G --kernel vmlinuz --disk vm.img --api vm.sock"
    "vmferry migrate --api vm.sock tcp:host2:7000 --insecure"
    "# Show the options and examples of a command"
    "vmferry help migrate"
};

pub(super) const DEMO: &str = examples! {
    "vmferry demo --memory 2G --mode postcopy"
    "# A link of 2 Gbit/s, and a report for programs"
    "vmferry demo --link 2gbit --json -"
};

pub(super) const RUN: &str = examples! {
    "# Boot Linux, with a disk and the console on this terminal"
    "vmferry run --memory 4G --cpus 2 --kernel vmlinuz --initrd initrd.img \\"
    "  --cmdline console=ttyS0 --disk vm.img --serial stdio --api vm.sock"
    "# Wait for a guest from another host, over encrypted connections"
    "vmferry run --memory 4G --cpus 2 --disk vm.img --api vm.sock \\"
    "  --incoming tcp:0.0.0.0:7000 --tls-cert c.pem --tls-key k.pem --tls-ca ca.pem"
    "# Run the measuring guest, which needs no kernel"
    "vmferry run --memory 1G --workload uniform,ws=256M,rate=100k --api vm.sock"
    "# Restore a guest from a file"
    "vmferry run --memory 4G --cpus 2 --disk vm.img --incoming file:vm.saved"
};

pub(super) const BRANCH: &str = examples! {
    "# Start a guest whose memory can be shared, and branch it four times"
    "vmferry run --memory 4G --memory-backing memfd --kernel vmlinuz --api vm.sock"
    "vmferry branch --api vm.sock --count 4 --api-dir children"
    "# Control the first child"
    "vmferry status --api children/0.sock"
    "# Give each child a copy of the disks, on the same file system"
    "vmferry branch --api vm.sock --api-dir children --disk-overlay /srv/disks"
};

pub(super) const MIGRATE: &str = examples! {
    "vmferry migrate --api vm.sock tcp:host2:7000 --tls-cert c.pem \\"
    "  --tls-key k.pem --tls-ca ca.pem"
    "# Leave bandwidth for others, and switch to postcopy after two minutes"
    "vmferry migrate --api vm.sock tcp:host2:7000 --insecure \\"
    "  --max-bandwidth 2gbit --timeout 2m --on-timeout postcopy"
    "# Write a copy of the guest into a file, and keep the guest running"
    "vmferry migrate --api vm.sock file:vm.saved --keep-running"
    "# Hand the guest to another process of this host, without copying its memory"
    "vmferry migrate --api vm.sock unix:target.sock --local"
    "# Write a report for programs"
    "vmferry migrate --api vm.sock unix:target.sock --json report.json"
};

pub(super) const SNAPSHOT: &str = examples! {
    "vmferry snapshot --api vm.sock file:vm.saved"
    "# Leave bandwidth for others, and compare the file with the guest"
    "vmferry snapshot --api vm.sock file:vm.saved --max-bandwidth 250M/s \\"
    "  --verify"
    "# Run the copy, which gets a new identity"
    "vmferry run --memory 4G --incoming file:vm.saved"
    "# Write what has changed since then, and make one file of both"
    "vmferry snapshot --api vm.sock --since vm.saved file:vm.later"
    "vmferry snapshot merge file:vm.later file:vm.whole"
};

pub(super) const RECORD: &str = examples! {
    "# Record the pages that the guest uses after its start"
    "vmferry run --from vm.saved --shared --record vm.pages --api vm.sock"
    "vmferry record --api vm.sock"
    "# Bring these pages in when the next guest starts"
    "vmferry run --from vm.saved --shared --prefetch vm.pages"
};

pub(super) const UPGRADE: &str = examples! {
    "# Start a guest that can be upgraded"
    "vmferry run --memory 4G --memory-backing memfd --kernel vmlinuz --api vm.sock"
    "# Continue it with another version of vmferry"
    "vmferry upgrade --api vm.sock --binary /usr/local/bin/vmferry.new"
};

pub(super) const PAUSE: &str = examples! { "vmferry pause --api vm.sock" };

pub(super) const RESUME: &str = examples! { "vmferry resume --api vm.sock" };

pub(super) const POWERDOWN: &str = examples! { "vmferry powerdown --api vm.sock" };

pub(super) const QUIT: &str = examples! { "vmferry quit --api vm.sock" };

pub(super) const BALLOON: &str = examples! {
    "vmferry balloon --api vm.sock"
    "# Let the guest use 2 GiB"
    "vmferry balloon --api vm.sock --target 2G"
    "# Keep the pages that the guest reports as unused"
    "vmferry balloon --api vm.sock --reporting off"
};

pub(super) const DIRTY_RATE: &str = examples! {
    "vmferry dirty-rate --api vm.sock"
    "vmferry dirty-rate --api vm.sock --windows 100ms,1s --json -"
};

pub(super) const PLAN: &str = examples! {
    "# Measure the link to a target that waits for a guest"
    "vmferry plan --api vm.sock tcp:host2:7000 --insecure"
    "# Plan for a link of a given rate, without a target"
    "vmferry plan --api vm.sock --bandwidth 10gbit"
};

pub(super) const STATUS: &str = examples! {
    "vmferry status --api vm.sock"
    "# Show only whether the guest runs in this process"
    "vmferry status --api vm.sock | jq .vm.place"
};

#[cfg(feature = "top")]
pub(super) const TOP: &str = examples! { "vmferry top --api vm1.sock vm2.sock" };

pub(super) const CANCEL: &str = examples! { "vmferry cancel --api vm.sock" };

pub(super) const SWITCH: &str = examples! { "vmferry switch --api vm.sock" };

pub(super) const RECOVER: &str = examples! {
    "# Connect again to a target that the link was lost to"
    "vmferry recover --api vm.sock"
    "# Resume the guest at the source, after the target's process has ended"
    "vmferry recover --api vm.sock --take"
};

pub(super) const CHECK: &str = examples! {
    "vmferry check"
    "vmferry check --json -"
};

pub(super) const REPORT: &str = examples! {
    "vmferry report report.json -o report.html"
    "# The report and the events of one migration on one page"
    "vmferry report report.json events.json -o report.html"
};

pub(super) const COMPLETIONS: &str = examples! {
    "vmferry completions bash > /etc/bash_completion.d/vmferry"
};

pub(super) const MAN: &str = examples! { "vmferry man /usr/local/share/man/man1" };
