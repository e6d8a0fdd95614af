//! Migrations over encrypted connections, and peers that are refused.

use crate::authority::Authority;
use crate::rig::{attempt, check_owner, move_well_to, quick, unix_uri};
use crate::toy::{Options, Toy, Tracking};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vmferry_engine::{
    Arrival, Listener, Migratable, MigrationHandle, MigrationState, ReceiveFailure, Settings, Tls, Uri,
    receive,
};
use vmferry_testkit_peers::link::{Direction, Harm, Proxy, Rule};
use vmferry_testkit_peers::peer::{exchange_hello, hello, receive_message, send_message};
use vmferry_wire::{Mode, RefusalCode, Role, ToSource, ToTarget, Token};

fn host(authority: &Authority, name: &str) -> Tls {
    let (certificate, key) = authority.issue(name);
    Tls::from_pem(certificate.as_bytes(), key.as_bytes(), authority.pem.as_bytes()).unwrap()
}

fn loopback() -> Uri {
    Uri::Tcp { host: "127.0.0.1".into(), port: 0 }
}

/// By precopy. Postcopy is tested with guests that have real faults.
#[test]
fn guests_move_over_any_number_of_channels() {
    let authority = Authority::new();
    for channels in [1, 4] {
        let listener = Listener::bind_encrypted(&loopback(), host(&authority, "127.0.0.1")).unwrap();
        let tls = Some(host(&authority, "source"));
        let settings = Settings { channels, tls, verify: true, ..quick() };
        let (report, _) = move_well_to(&listener, Options::default(), &settings);
        assert_eq!((report.verified_pages, report.mismatched_pages), (1900, 0));
        assert!(report.bytes.raw_pages >= 1200, "{:?}", report.bytes);
    }
}

/// Encryption detects every change. Wherever the change is, the guest stays complete on source or
/// target.
#[test]
fn changed_bytes_are_never_accepted() {
    let (authority, ends) = (Authority::new(), Mutex::new(Vec::new()));
    let changed = |connection, after| {
        let options =
            Options { pages: vec![520, 40], used: 24, tracking: Tracking::ByHand, ..Options::default() };
        let mut source = Toy::new(options, true);
        let mut target = source.target();
        let uri = unix_uri();
        let listener = Listener::bind_encrypted(&uri, host(&authority, "target")).unwrap();
        let rule = Rule::on(Direction { connection, to_target: true }, after, Harm::Flip);
        let proxy = Proxy::new(&uri, Some(rule));
        let tls = Some(host(&authority, "source").expecting("target").unwrap());
        let settings = Settings { tls, peer_timeout: Duration::from_secs(2), ..quick() };
        let ended =
            attempt(&mut source, &mut target, &listener, &proxy.uri(), &settings, &MigrationHandle::new());
        check_owner(&source, &target, &ended);
        if proxy.harmed() > 0 {
            assert_ne!(ended.state(), Some(MigrationState::Completed), "{rule:?}");
            assert!(source.works() && source.lost().is_empty(), "{rule:?}: {}", ended.error());
            ends.lock().unwrap().push(ended.error());
        }
    };
    // Run in parallel, because these migrations mostly wait for a peer that is silent.
    std::thread::scope(|scope| {
        for (connection, after) in
            [(0, 3), (0, 900), (0, 2500), (0, 4000), (1, 700), (1, 5000), (1, 20_000), (1, 60_000)]
        {
            let changed = &changed;
            scope.spawn(move || changed(connection, after));
        }
    });
    let ends = ends.into_inner().unwrap();
    assert!(ends.len() > 4, "hardly any byte was changed: {ends:?}");
    assert!(ends.iter().any(|error| error.contains("encrypt") || error.contains("BadRecordMac")), "{ends:?}");
}

type Channel = StreamOwned<ClientConnection, TcpStream>;

/// Host with a certificate of the authority that speaks the protocol step by step.
struct ByHand {
    config: Arc<ClientConfig>,
    port: u16,
}

impl ByHand {
    fn new(authority: &Authority, name: &str, port: u16) -> Self {
        let (certificate, key) = authority.issue(name);
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()],
                PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
            )
            .unwrap();
        Self { config: Arc::new(config), port }
    }

    /// Sends a hello. Returns the channel and the refusal, if there is one.
    fn open_channel(&self, role: Role, token: Token) -> (Channel, Option<RefusalCode>) {
        let name = "127.0.0.1".try_into().unwrap();
        let connection = ClientConnection::new(Arc::clone(&self.config), name).unwrap();
        let socket = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut channel = StreamOwned::new(connection, socket);
        let refused = exchange_hello(&mut channel, &hello(role, 0, token));
        (channel, refused)
    }
}

/// A host with a valid certificate and a stolen channel token is refused, because the guest comes
/// from another host.
#[test]
fn channel_of_another_host_is_refused() {
    let authority = Authority::new();
    let source = Toy::new(Options::default(), true);
    let mut target = source.target();
    let machine = target.config();
    let listener = Listener::bind_encrypted(&loopback(), host(&authority, "127.0.0.1")).unwrap();
    let Ok(Uri::Tcp { port, .. }) = listener.uri() else { panic!("no port") };
    let arrival = Arrival::new(vmferry_testkit::PATIENCE);
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&mut target, &listener, &arrival));
        let one = ByHand::new(&authority, "source", port);
        let (mut control, refused) = one.open_channel(Role::Control, Token::NONE);
        assert_eq!(refused, None);
        let setup = ToTarget::Setup {
            machine,
            mode: Mode::Precopy,
            bulk_channels: 1,
            urgent_channels: 0,
            probe: false,
        };
        send_message(&mut control, &setup);
        let Some(ToSource::Accept { bulk, .. }) = receive_message(&mut control) else {
            panic!("not accepted")
        };
        // A second certificate for the same name counts as another host, because an authority
        // issues only one for each.
        for name in ["elsewhere", "source"] {
            let other = ByHand::new(&authority, name, port);
            assert_eq!(other.open_channel(Role::Bulk, bulk).1, Some(RefusalCode::Token), "{name}");
        }
        assert_eq!(one.open_channel(Role::Bulk, bulk).1, None);
        drop(control);
        assert!(matches!(receiving.join().unwrap(), Err(ReceiveFailure::Failed(_))));
    });
}
