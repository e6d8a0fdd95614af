//! A real etcd for tests, and a proxy before it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
pub(crate) use vmferry_bench::etcd::{Etcd, NoEtcd};
use vmferry_testkit::{Need, skip};

pub(crate) fn start() -> Option<Etcd> {
    or_skip(Etcd::start())
}

/// Returns the etcd; `None` if it is not installed. The calling test is skipped then.
pub(crate) fn or_skip(etcd: Result<Etcd, NoEtcd>) -> Option<Etcd> {
    match etcd {
        Ok(etcd) => Some(etcd),
        Err(error @ NoEtcd::Start(_)) => {
            skip(Need::Etcd, error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A proxy before an etcd, which delays the answers.
pub(crate) struct Slow {
    port: u16,
    delay_ms: Arc<AtomicU64>,
}

impl Slow {
    pub(crate) fn before(etcd: &Etcd) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (to, delay_ms) = (etcd.port(), Arc::<AtomicU64>::default());
        let delay = Arc::clone(&delay_ms);
        // The thread ends with the test process, and holds only sockets.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(("127.0.0.1", to)) else { continue };
                let (back, answers) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let delay = Arc::clone(&delay);
                std::thread::spawn(move || pump(client, server, &AtomicU64::new(0)));
                std::thread::spawn(move || pump(answers, back, &delay));
            }
        });
        Self { port, delay_ms }
    }

    pub(crate) fn arbiter(&self) -> String {
        format!("etcd:http://127.0.0.1:{}", self.port)
    }

    pub(crate) fn delay(&self, by: Duration) {
        self.delay_ms.store(u64::try_from(by.as_millis()).unwrap(), Ordering::Release);
    }
}

fn pump(mut from: TcpStream, mut into: TcpStream, delay_ms: &AtomicU64) {
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        std::thread::sleep(Duration::from_millis(delay_ms.load(Ordering::Acquire)));
        if into.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = into.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
