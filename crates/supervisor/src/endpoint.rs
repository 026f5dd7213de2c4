//! The metrics endpoint for Prometheus: `GET /metrics`, and nothing else.
//!
//! It is a minimal HTTP/1.1 server on its own thread: a scraper needs no more, and it keeps the supervisor small. It is read-only,
//! and limits the length, number and duration of requests. At an address that other hosts can reach, it requires a bearer token.
//! The traffic is not encrypted: use it on a trusted network.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use shardwise_journal::prometheus;

use crate::error::{Error, Result};
use crate::metrics::Metrics;

/// The environment variable with the token.
const TOKEN: &str = "SHARDWISE_METRICS_TOKEN";

/// The shortest token that is accepted.
const TOKEN_BYTES_MIN: usize = 16;

/// The maximum length of a request, its time limit, and the maximum number of concurrent requests.
const REQUEST_BYTES_MAX: usize = 8 << 10;
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
const REQUESTS_MAX: usize = 8;

/// The pause after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// The address to listen at: a port of this host, or an address and a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(SocketAddr);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let here = |port| Address(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
        if let Ok(port) = text.parse() {
            return Ok(here(port));
        }
        let address = text.parse().map(Address);
        address.map_err(|_| "write a port (9464) or an address and a port (127.0.0.1:9464, [::1]:9464)".to_string())
    }
}

/// A running endpoint. It runs until the process exits.
pub struct Endpoint {
    address: SocketAddr,
}

/// The state that the threads share.
struct Service {
    metrics: Arc<Mutex<Metrics>>,
    token: Option<String>,
    active_requests: AtomicUsize,
}

impl Endpoint {
    /// Starts to serve these metrics.
    pub fn serve(address: Address, metrics: Arc<Mutex<Metrics>>) -> Result<Self> {
        let token = std::env::var(TOKEN).ok().filter(|token| !token.is_empty());
        Endpoint::serve_with(address, metrics, token)
    }

    fn serve_with(Address(address): Address, metrics: Arc<Mutex<Metrics>>, token: Option<String>) -> Result<Self> {
        let is_long_enough = token.as_ref().is_some_and(|token| token.len() >= TOKEN_BYTES_MIN);
        if !address.ip().is_loopback() && !is_long_enough {
            return Err(Error::MetricsToken(format!(
                "--metrics {address}: other hosts can reach this address, so set {TOKEN} to at least {TOKEN_BYTES_MIN} characters, or \
                 give only a port"
            )));
        }
        let fail = |error: std::io::Error| Error::failed(format!("--metrics {address}"), error);
        let listener = TcpListener::bind(address).map_err(fail)?;
        let bound = listener.local_addr().map_err(fail)?;
        let service = Arc::new(Service { metrics, token, active_requests: AtomicUsize::new(0) });
        let thread = std::thread::Builder::new().name("metrics".to_string());
        let started = thread.spawn(move || accept(&listener, &service));
        started.map_err(|error| Error::failed("starting the thread of --metrics", error))?;
        Ok(Endpoint { address: bound })
    }

    /// The address that it listens at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

fn accept(listener: &TcpListener, service: &Arc<Service>) {
    loop {
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(PAUSE);
            continue;
        };
        if service.active_requests.fetch_add(1, Ordering::Relaxed) >= REQUESTS_MAX {
            service.active_requests.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let shared = service.clone();
        let thread = std::thread::Builder::new().name("metrics request".to_string());
        let started = thread.spawn(move || {
            // Errors are ignored: the client may be gone.
            drop(shared.answer(stream));
            shared.active_requests.fetch_sub(1, Ordering::Relaxed);
        });
        if started.is_err() {
            service.active_requests.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Service {
    fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        stream.set_write_timeout(Some(REQUEST_LIMIT))?;
        let answer = match read_request(&mut stream)? {
            Some(request) => self.respond(&request),
            None => response("431 Request Header Fields Too Large", "", "The request is too long.\n"),
        };
        stream.write_all(answer.as_bytes())?;
        stream.shutdown(std::net::Shutdown::Write)
    }

    /// Returns the response to the head of a request.
    fn respond(&self, request: &str) -> String {
        let mut lines = request.lines();
        let mut words = lines.next().unwrap_or_default().split(' ');
        let (method, path, version) = (words.next(), words.next(), words.next());
        if !version.is_some_and(|version| version.starts_with("HTTP/1.")) || words.next().is_some() {
            return response("400 Bad Request", "", "This is an HTTP/1.1 endpoint.\n");
        }
        if !self.admits(lines) {
            return response("401 Unauthorized", "WWW-Authenticate: Bearer\r\n", "A bearer token is required.\n");
        }
        match (method, path.map(|path| path.split('?').next().unwrap_or(path))) {
            (Some("GET"), Some("/metrics")) => {
                let run = self.metrics.lock().unwrap_or_else(PoisonError::into_inner).to_run();
                let kind = format!("Content-Type: {}\r\n", prometheus::CONTENT_TYPE);
                response("200 OK", &kind, &prometheus::text(&run))
            }
            (Some("GET"), _) => response("404 Not Found", "", "Only /metrics exists.\n"),
            _ => response("405 Method Not Allowed", "Allow: GET\r\n", "Only GET is supported.\n"),
        }
    }

    /// Whether a request with these headers has the token, if one is required.
    fn admits<'a>(&self, mut headers: impl Iterator<Item = &'a str>) -> bool {
        let Some(token) = &self.token else { return true };
        let given = headers.find_map(|header| {
            let (name, value) = header.split_once(':')?;
            let (scheme, given) = value.trim().split_once(' ')?;
            (name.eq_ignore_ascii_case("authorization") && scheme.eq_ignore_ascii_case("bearer")).then(|| given.trim())
        });
        given.is_some_and(|given| is_equal(given.as_bytes(), token.as_bytes()))
    }
}

/// Reads the head of a request; `None` if it is too long.
fn read_request(stream: &mut TcpStream) -> std::io::Result<Option<String>> {
    let (end, mut head, mut piece) = (Instant::now() + REQUEST_LIMIT, Vec::new(), [0; 1024]);
    while !head.windows(4).any(|four| four == b"\r\n\r\n") {
        if head.len() > REQUEST_BYTES_MAX {
            return Ok(None);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            count => head.extend_from_slice(&piece[..count]),
        }
    }
    Ok(Some(String::from_utf8_lossy(&head).into_owned()))
}

fn response(status: &str, headers: &str, body: &str) -> String {
    let headers = match headers.contains("Content-Type") {
        true => headers.to_string(),
        false => format!("Content-Type: text/plain; charset=utf-8\r\n{headers}"),
    };
    format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
}

/// Compares a given token with the right one in a time that does not depend on where they differ.
fn is_equal(given: &[u8], token: &[u8]) -> bool {
    let differ = given.iter().zip(token).fold(0, |differ, (a, b)| differ | (a ^ b));
    given.len() == token.len() && differ == 0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use shardwise_journal::{Entry, EntryKind, Step, StepTraffic, VerbTraffic};

    use super::*;

    fn metrics() -> Arc<Mutex<Metrics>> {
        let mut metrics = Metrics::default();
        for step in 1..=3 {
            metrics.add(&Entry::now(EntryKind::Step(Step { step, loss: f64::NAN, ..Step::default() })));
            let verb = VerbTraffic { verb: "all-gather".to_string(), calls: 2, bytes: 500, expected_bytes: 400 };
            metrics.add(&Entry::now(EntryKind::Traffic(StepTraffic { step, steps: 1, verbs: vec![verb] })));
        }
        Arc::new(Mutex::new(metrics))
    }

    fn ask(endpoint: &Endpoint, request: &str) -> String {
        let mut stream = TcpStream::connect(endpoint.address()).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn only_metrics_are_served() {
        let endpoint = Endpoint::serve_with("0".parse().unwrap(), metrics(), None).unwrap();
        assert!(endpoint.address().ip().is_loopback());
        let page = ask(&endpoint, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
        let (head, body) = page.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
        assert!(
            body.contains("\nshardwise_step 3\n") && body.contains("sent_bytes_total{collective=\"all-gather\"} 1500"),
            "{body}"
        );
        for (request, status) in [
            ("GET / HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("GET /metrics\r\n\r\n", "400"),
            ("\u{0}\u{1}\r\n\r\n", "400"),
            (&format!("GET /metrics HTTP/1.1\r\n{}", "x".repeat(9 << 10)), "431"),
        ] {
            let answer = ask(&endpoint, request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {answer}");
        }
    }

    #[test]
    fn other_hosts_need_the_token() {
        let everywhere: Address = "0.0.0.0:0".parse().unwrap();
        for token in [None, Some("short".to_string())] {
            let error = Endpoint::serve_with(everywhere, metrics(), token).err().unwrap();
            assert!(error.to_string().contains(TOKEN), "{error}");
        }
        let endpoint = Endpoint::serve_with(everywhere, metrics(), Some("0123456789abcdef".to_string())).unwrap();
        let get = |header: &str| ask(&endpoint, &format!("GET /metrics HTTP/1.1\r\n{header}\r\n"));
        for header in ["", "Authorization: Bearer 0123456789abcdeg\r\n", "Authorization: Basic 0123456789abcdef\r\n"] {
            assert!(get(header).starts_with("HTTP/1.1 401 "), "{header}");
        }
        assert!(get("authorization: bearer 0123456789abcdef\r\n").starts_with("HTTP/1.1 200 "));
    }

    #[test]
    fn idle_connections_do_not_block_others_for_long() {
        let endpoint = Endpoint::serve_with("0".parse().unwrap(), metrics(), None).unwrap();
        let idle: Vec<TcpStream> = (0..50).map(|_| TcpStream::connect(endpoint.address()).unwrap()).collect();
        let started = Instant::now();
        loop {
            let mut stream = TcpStream::connect(endpoint.address()).unwrap();
            let mut answer = String::new();
            // It may be rejected until the idle connections time out.
            let asked =
                stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").and_then(|()| stream.read_to_string(&mut answer));
            if asked.is_ok() && answer.starts_with("HTTP/1.1 200 ") {
                break;
            }
            assert!(started.elapsed() < 10 * REQUEST_LIMIT);
            std::thread::sleep(PAUSE);
        }
        drop(idle);
    }

    #[test]
    fn an_address_may_be_a_port_alone() {
        assert_eq!("9464".parse::<Address>().unwrap().0.to_string(), "127.0.0.1:9464");
        assert_eq!("[::]:1".parse::<Address>().unwrap().0.to_string(), "[::]:1");
        for wrong in ["", ":9464", "70000", "host", "0.0.0.0"] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }
}
