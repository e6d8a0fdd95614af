//! Findings about the host: huge pages, networks, kind of KVM.

use super::Finding;
use std::fs::{self, File};
use std::path::Path;

/// Number of a capability of capabilities(7).
pub(super) const CAP_NET_ADMIN: u32 = 12;
pub(super) const CAP_SYS_PTRACE: u32 = 19;
pub(super) const CAP_SYS_ADMIN: u32 = 21;

pub(super) fn findings() -> Vec<Finding> {
    vec![
        Finding::new(
            "transparent_huge_pages",
            "transparent huge pages",
            transparent_huge_pages(),
            "memory is mapped in 4 KiB pages, which is slower: set it to madvise or always",
        ),
        Finding::new(
            "huge_pages",
            "huge pages set aside",
            pool(),
            "only `--memory-backing hugetlbfs` needs them: `sysctl vm.nr_hugepages=512` sets 1 GiB aside",
        ),
        Finding::new(
            "tap",
            "tap devices",
            tap(),
            "`run --net` needs one: load the module tun and be root, or let an administrator make one for this user with \
             `ip tuntap add dev NAME mode tap user USER`",
        ),
        Finding::new(
            "network_namespaces",
            "network namespaces",
            namespaces(),
            "only `vmferry-bench` needs them, for links of a given rate: be root, with iproute2 installed",
        ),
    ]
}

/// Returns the kind of this host's KVM: with hardware virtualization or paravirtual.
pub(super) fn kind_of_kvm() -> &'static str {
    let loaded = |module: &str| Path::new("/sys/module").join(module).exists();
    match () {
        () if loaded("kvm_pvm") => "paravirtual (kvm_pvm): a stock Linux kernel does not boot in it",
        () if loaded("kvm_intel") => "full (kvm_intel)",
        () if loaded("kvm_amd") => "full (kvm_amd)",
        () => "of a kind that /sys/module does not name",
    }
}

/// Returns whether this process has capability `number` in its effective set.
pub(super) fn has_capability(number: u32) -> bool {
    read("/proc/self/status").is_ok_and(|text| effective(&text) >> number & 1 != 0)
}

fn effective(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
}

fn read(path: &str) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))
}

fn transparent_huge_pages() -> Result<String, String> {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let text = read(path)?.trim().to_owned();
    if text.contains("[never]") { Err(format!("{path} says {text}")) } else { Ok(text) }
}

fn pool() -> Result<String, String> {
    let pool = vmferry_vmm::HugePagePool::read();
    if pool.pages == 0 {
        return Err("the pool is empty".into());
    }
    Ok(format!("{} of 2 MiB, {} free", pool.pages, pool.free))
}

fn tap() -> Result<String, String> {
    let path = "/dev/net/tun";
    File::options().read(true).write(true).open(path).map_err(|error| format!("{path}: {error}"))?;
    if has_capability(CAP_NET_ADMIN) {
        Ok(format!("{path}, and devices can be made (CAP_NET_ADMIN)"))
    } else {
        Err(format!(
            "{path} can be opened, but without CAP_NET_ADMIN only devices that were made for this user can be used"
        ))
    }
}

fn namespaces() -> Result<String, String> {
    if !Path::new("/proc/self/ns/net").exists() {
        return Err("this kernel is built without network namespaces".into());
    }
    if !(has_capability(CAP_SYS_ADMIN) && has_capability(CAP_NET_ADMIN)) {
        return Err("this process lacks CAP_SYS_ADMIN or CAP_NET_ADMIN".into());
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let installed = |tool: &str| std::env::split_paths(&folders).any(|folder| folder.join(tool).is_file());
    match ["ip", "tc"].into_iter().find(|tool| !installed(tool)) {
        Some(tool) => Err(format!("'{tool}' is not installed")),
        None => Ok("permitted; ip and tc are installed".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effective_capabilities_are_parsed() {
        let status = "Name:\tx\nCapEff:\t0000000000201000\nSeccomp:\t0\n";
        assert_eq!(effective(status), 1 << CAP_SYS_ADMIN | 1 << CAP_NET_ADMIN);
        assert_eq!(effective("CapEff:\tnonsense\n"), 0);
    }
}
