//! A client of the Kubernetes API server: requests whose responses are read as a stream, with a service account's
//! token.
//!
//! A crate for Kubernetes would add about a fifth to the build of the whole workspace, and few requests are needed: the
//! extender's list and watch, and the daemon's writes. Every request has its own connection, so that a failed request
//! affects no other. Every read has a deadline.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// Path of the two resources.
pub const RESOURCE_PATH: &str = "/apis/cachemate.io/v1alpha1";
/// Directory in which Kubernetes mounts a pod's token and the certificate of the API server's authority.
const SERVICE_ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Maximum size of a token or of a file of certificates.
const MAX_SECRET_BYTES: u64 = 1 << 20;
/// Maximum size of the head of a response, and of one of its lines.
const MAX_HEAD_BYTES: u64 = 64 << 10;

/// Address of an API server, and the means to prove both sides' identities.
pub struct ApiServer {
    host: String,
    port: u16,
    /// `None` for a server without encryption, such as `kubectl proxy` on the same host.
    tls: Option<Arc<ClientConfig>>,
    /// File with the token; it is read for each request, because tokens are replaced every hour.
    token_file: Option<PathBuf>,
}

/// Is a host this one, by an address or name that does not depend on a resolver?
fn is_loopback(host: &str) -> bool {
    let address = host.parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

impl ApiServer {
    /// The server that a pod finds in its environment; an error names the variable that is missing.
    pub fn in_cluster() -> anyhow::Result<Self> {
        let env_variable = |name: &str| {
            std::env::var(name).with_context(|| format!("{name}: not set; expected a pod"))
        };
        let (host, port) = (
            env_variable("KUBERNETES_SERVICE_HOST")?,
            env_variable("KUBERNETES_SERVICE_PORT")?,
        );
        let host = if host.contains(':') {
            format!("[{host}]")
        } else {
            host
        };
        let dir = Path::new(SERVICE_ACCOUNT_DIR);
        Self::new(
            &format!("https://{host}:{port}"),
            Some(&dir.join("ca.crt")),
            Some(dir.join("token")),
        )
    }

    /// Builds a server by its URL.
    pub fn new(
        url: &str,
        ca_file: Option<&Path>,
        token_file: Option<PathBuf>,
    ) -> anyhow::Result<Self> {
        let url_problem =
            || format!("found '{url}', expected https://HOST:PORT, http://HOST:PORT or in-cluster");
        let (scheme, address) = url.split_once("://").with_context(url_problem)?;
        let (host, port) = address
            .trim_end_matches('/')
            .rsplit_once(':')
            .with_context(url_problem)?;
        let port = port.parse().ok().with_context(url_problem)?;
        ensure!(
            !host.is_empty()
                && host
                    .bytes()
                    .all(|byte| byte.is_ascii_graphic() && byte != b'/'),
            url_problem()
        );
        let tls = match (scheme, ca_file) {
            ("http", _) => None,
            ("https", Some(file)) => Some(Arc::new(tls_config(file)?)),
            ("https", None) => {
                bail!("--ca-file: expected the certificate of the server's authority")
            }
            _ => bail!(url_problem()),
        };
        let host = host
            .trim_start_matches('[')
            .trim_end_matches(']')
            .to_string();
        ensure!(
            tls.is_some() || token_file.is_none() || is_loopback(&host),
            "found '{url}' with a token, expected https, or http to this host, because others can read the token"
        );
        Ok(ApiServer {
            host,
            port,
            tls,
            token_file,
        })
    }

    /// Requests a path. `read_deadline` applies to every read of the response.
    pub fn get(&self, path: &str, read_deadline: Duration) -> anyhow::Result<ApiResponse> {
        self.send("GET", path, None, read_deadline)
    }

    /// Sends a request, with the type and text of its body. `read_deadline` applies to every read of the answer.
    pub fn send(
        &self,
        method: &str,
        path: &str,
        body: Option<(&str, &str)>,
        read_deadline: Duration,
    ) -> anyhow::Result<ApiResponse> {
        let address = (self.host.as_str(), self.port).to_socket_addrs()?.next();
        let address = address.with_context(|| format!("{}: no address", self.host))?;
        let stream = TcpStream::connect_timeout(&address, CONNECT_DEADLINE)?;
        stream.set_read_timeout(Some(read_deadline))?;
        stream.set_write_timeout(Some(CONNECT_DEADLINE))?;
        let mut stream: Box<dyn ApiStream> = match &self.tls {
            None => Box::new(stream),
            Some(config) => {
                let name = ServerName::try_from(self.host.clone())?;
                Box::new(StreamOwned::new(
                    ClientConnection::new(Arc::clone(config), name)?,
                    stream,
                ))
            }
        };
        let mut head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {}:{}\r\naccept: application/json\r\nuser-agent: cachemate\r\nconnection: \
             close\r\n",
            self.host, self.port
        );
        if let Some(file) = &self.token_file {
            let token = read_secret(file)?;
            let token = token.trim();
            ensure!(
                token.bytes().all(|byte| byte.is_ascii_graphic()),
                "{}: not a token",
                file.display()
            );
            head.push_str(&format!("authorization: Bearer {token}\r\n"));
        }
        if let Some((content_type, text)) = body {
            head.push_str(&format!(
                "content-type: {content_type}\r\ncontent-length: {}\r\n",
                text.len()
            ));
        }
        head.push_str("\r\n");
        head.push_str(body.map_or("", |(_, text)| text));
        stream.write_all(head.as_bytes())?;
        stream.flush()?;
        ApiResponse::read_head(BufReader::new(stream))
    }
}

/// Reads a token or certificates; an error names the file.
fn read_secret(file: &Path) -> anyhow::Result<String> {
    cachemate_files::read_text_limited(file, MAX_SECRET_BYTES)
        .with_context(|| format!("{}: cannot be read", file.display()))
}

trait ApiStream: Read + Write + Send {}
impl<S: Read + Write + Send> ApiStream for S {}

fn tls_config(ca_file: &Path) -> anyhow::Result<ClientConfig> {
    let name = ca_file.display();
    let text = read_secret(ca_file)?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(text.as_bytes()) {
        roots.add(certificate.with_context(|| format!("{name}: expected certificates in PEM"))?)?;
    }
    ensure!(
        !roots.is_empty(),
        "{name}: found no certificate, expected one or more"
    );
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

/// The remaining body of a response, as its head describes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RemainingBody {
    /// Bytes that are left of a body of known length.
    Known(u64),
    /// Bytes that are left of the present chunk; `None` once the last one has ended.
    Chunked(Option<u64>),
    /// The body ends with the connection.
    UntilClosed,
}

/// A response whose body is read as it arrives.
pub struct ApiResponse {
    pub status: u16,
    stream: BufReader<Box<dyn ApiStream>>,
    remaining_body: RemainingBody,
}

impl ApiResponse {
    fn read_head(mut stream: BufReader<Box<dyn ApiStream>>) -> anyhow::Result<Self> {
        let (mut status, mut remaining_body, mut read_bytes) =
            (None, RemainingBody::UntilClosed, 0);
        loop {
            let mut line = Vec::new();
            read_bytes += (&mut stream)
                .take(MAX_HEAD_BYTES)
                .read_until(b'\n', &mut line)? as u64;
            ensure!(
                line.ends_with(b"\n") && read_bytes <= MAX_HEAD_BYTES,
                "the head of the answer does not end"
            );
            let line = String::from_utf8_lossy(&line)
                .trim_end()
                .to_ascii_lowercase();
            if status.is_none() {
                let status_code = line
                    .strip_prefix("http/1.")
                    .and_then(|rest| rest.split(' ').nth(1)?.parse().ok());
                status = Some(
                    status_code.with_context(|| format!("found '{line}', expected HTTP/1.1"))?,
                );
                continue;
            }
            match line.split_once(':') {
                _ if line.is_empty() => break,
                Some(("content-length", value)) if remaining_body == RemainingBody::UntilClosed => {
                    remaining_body = RemainingBody::Known(
                        value
                            .trim()
                            .parse()
                            .context("content-length: expected a number")?,
                    );
                }
                Some(("transfer-encoding", value)) if value.trim() == "chunked" => {
                    remaining_body = RemainingBody::Chunked(Some(0));
                }
                _ => {}
            }
        }
        Ok(ApiResponse {
            status: status.unwrap_or(0),
            stream,
            remaining_body,
        })
    }

    /// Reads the size of the next chunk.
    fn read_chunk_size(&mut self) -> std::io::Result<Option<u64>> {
        let chunk_error = || std::io::Error::other("the answer's chunks are broken");
        for _ in 0..2 {
            let mut line = Vec::new();
            (&mut self.stream).take(1024).read_until(b'\n', &mut line)?;
            if line.is_empty() {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            let text = String::from_utf8_lossy(&line);
            let digits = text.split(';').next().unwrap_or("").trim();
            // A chunk is followed by an empty line.
            if !digits.is_empty() {
                let size = u64::from_str_radix(digits, 16).map_err(|_| chunk_error())?;
                return Ok((size > 0).then_some(size));
            }
        }
        Err(chunk_error())
    }
}

impl Read for ApiResponse {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if let RemainingBody::Chunked(Some(0)) = self.remaining_body {
            self.remaining_body = RemainingBody::Chunked(self.read_chunk_size()?);
        }
        let remaining_bytes = match self.remaining_body {
            RemainingBody::UntilClosed => return self.stream.read(buffer),
            RemainingBody::Chunked(None) | RemainingBody::Known(0) => return Ok(0),
            RemainingBody::Chunked(Some(left)) | RemainingBody::Known(left) => left,
        };
        let max_bytes = buffer
            .len()
            .min(usize::try_from(remaining_bytes).unwrap_or(usize::MAX));
        let count = self.stream.read(&mut buffer[..max_bytes])?;
        if count == 0 && max_bytes > 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let remaining_after = remaining_bytes - count as u64;
        self.remaining_body = match self.remaining_body {
            RemainingBody::Chunked(_) => RemainingBody::Chunked(Some(remaining_after)),
            _ => RemainingBody::Known(remaining_after),
        };
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a token sent only to this host or under encryption?
    #[test]
    fn a_token_never_leaves_the_host_in_clear_text() {
        let open = |url: &str| ApiServer::new(url, None, Some(PathBuf::from("token")));
        for url in [
            "http://192.0.2.2:8001",
            "http://example.org:80",
            "http://[2001:db8::1]:80",
        ] {
            let error = open(url).map(drop).unwrap_err().to_string();
            assert!(error.contains("expected https"), "{error}");
            assert!(
                ApiServer::new(url, None, None).is_ok(),
                "{url} without a token"
            );
        }
        for url in [
            "http://127.0.0.1:8001",
            "http://[::1]:8001",
            "http://localhost:8001",
        ] {
            assert!(open(url).is_ok(), "{url}");
        }
    }
}
