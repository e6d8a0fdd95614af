//! Environments in which benches start processes.

use crate::density::Budget;
use crate::link::{End, Link};
use anyhow::{Context, Result};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use std::ffi::OsString;
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Command;
use vmferry_client::{Environment, Role};

fn end(role: Role) -> End {
    match role {
        Role::Source => End::Source,
        Role::Target => End::Destination,
    }
}

impl Environment for Link {
    fn address(&self, role: Role) -> Ipv4Addr {
        Link::address(self, end(role))
    }

    fn enter(&self, role: Role, command: &mut Command) -> io::Result<()> {
        Link::enter(self, end(role), command)
    }
}

impl Environment for Budget {
    fn enter(&self, _: Role, command: &mut Command) -> io::Result<()> {
        Budget::enter(self, command)
    }

    fn started(&self, _: Role, pid: u32) -> io::Result<()> {
        self.adopt(pid)
    }
}

/// Certificates with which the processes of one host encrypt their connections.
///
/// The authority of the certificates exists only for one measurement. The authority's key is not
/// stored.
#[derive(Debug)]
pub(super) struct Certificates {
    folder: tempfile::TempDir,
}

/// Option and file name of each part.
const FILES: [(&str, &str); 3] =
    [("--tls-cert", "host.pem"), ("--tls-key", "host.key"), ("--tls-ca", "authority.pem")];

impl Certificates {
    /// Creates certificates in a new folder, which is removed on drop.
    pub(super) fn new() -> Result<Self> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let key = KeyPair::generate()?;
        let authority = params.self_signed(&key)?.pem();
        let issuer = Issuer::new(params, key);
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()])?;
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &issuer)?.pem();
        let made = Self { folder: tempfile::tempdir()? };
        for (path, text) in made.paths().into_iter().zip([certificate, key.serialize_pem(), authority]) {
            let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
            file.and_then(|mut file| file.write_all(text.as_bytes()))
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(made)
    }

    fn paths(&self) -> [PathBuf; 3] {
        FILES.map(|(_, file)| self.folder.path().join(file))
    }
}

impl Environment for Certificates {
    fn options(&self, _: Role) -> Vec<OsString> {
        FILES
            .into_iter()
            .zip(self.paths())
            .flat_map(|((option, _), path)| [option.into(), path.into()])
            .collect()
    }
}
