//! The asking side of the control socket.

use super::MAX_LINE;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long an answer may take: longer than the other side waits for its machine, and that longer than a measurement.
const PATIENCE: Duration = Duration::from_secs(45);

/// A connection to a running vmferry.
pub(crate) struct Client {
    stream: BufReader<UnixStream>,
    path: PathBuf,
}

impl Client {
    pub(crate) fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| {
            format!("cannot reach a vmferry at {} (is one running with --api {0}?)", path.display())
        })?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { stream: BufReader::new(stream), path: path.into() })
    }

    /// Asks and waits for the answer.
    pub(crate) fn call(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.exchange(&json!({ "execute": command, "arguments": arguments }))
            .and_then(|answer| match answer {
                Value::Object(mut fields) => match (fields.remove("return"), fields.remove("error")) {
                    (Some(value), None) => Ok(value),
                    (_, Some(error)) => {
                        bail!("{}", error["desc"].as_str().unwrap_or("it refused without a reason"))
                    }
                    _ => bail!("the answer is neither a return nor an error"),
                },
                _ => bail!("the answer is no JSON object"),
            })
            .with_context(|| format!("{command} at {}", self.path.display()))
    }

    fn exchange(&mut self, request: &Value) -> Result<Value> {
        writeln!(self.stream.get_mut(), "{request}").context("the connection broke")?;
        let mut line = String::new();
        let mut limited = self.stream.by_ref().take(MAX_LINE as u64);
        if limited.read_line(&mut line).context("no answer came")? == 0 {
            bail!("the process ended");
        }
        serde_json::from_str(&line).context("the answer is no JSON")
    }
}
