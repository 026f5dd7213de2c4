//! The endpoint that Prometheus scrapes: `GET /metrics`, and nothing else.
//!
//! A few lines of HTTP/1.1 on a thread of their own, because a scraper needs no more and a supervisor should stay small. It changes
//! nothing and waits for nobody: requests are short, few at a time, and have seconds. At an address that others can reach it asks
//! for a bearer token; it is not sealed, so that is for a network of one's own.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use shardwise_journal::prometheus;

use crate::figures::Figures;

/// Where the token is.
const TOKEN: &str = "SHARDWISE_METRICS_TOKEN";

/// The shortest token that is one.
const TOKEN_BYTES_MIN: usize = 16;

/// The longest request, how long it may take, and how many there may be at once.
const REQUEST_BYTES_MAX: usize = 8 << 10;
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
const REQUESTS_MAX: usize = 8;

/// How long is waited after a connection could not be taken.
const PAUSE: Duration = Duration::from_millis(100);

/// Where to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address(SocketAddr);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let here = |port| Address(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
        if let Ok(port) = text.parse() {
            return Ok(here(port));
        }
        let address = text.parse().map(Address);
        address
            .map_err(|_| "a port, as in 9464, or an address and a port, as in 127.0.0.1:9464 or [::1]:9464".to_string())
    }
}

/// An endpoint at work, for as long as the process lasts.
pub(crate) struct Endpoint {
    address: SocketAddr,
}

/// What the thread has.
struct Page {
    figures: Arc<Mutex<Figures>>,
    token: Option<String>,
    under_way: AtomicUsize,
}

impl Endpoint {
    /// Begins to serve these figures.
    pub(crate) fn serve(address: Address, figures: Arc<Mutex<Figures>>) -> Result<Self> {
        let token = std::env::var(TOKEN).ok().filter(|token| !token.is_empty());
        Endpoint::serve_with(address, figures, token)
    }

    fn serve_with(Address(address): Address, figures: Arc<Mutex<Figures>>, token: Option<String>) -> Result<Self> {
        let is_enough = token.as_ref().is_some_and(|token| token.len() >= TOKEN_BYTES_MIN);
        if !address.ip().is_loopback() && !is_enough {
            bail!(
                "--metrics {address}: others can reach that address, so {TOKEN} has to be set, to {TOKEN_BYTES_MIN} characters or more; \
                 or give a port alone"
            );
        }
        let listener = TcpListener::bind(address).with_context(|| format!("--metrics {address}"))?;
        let address = listener.local_addr().with_context(|| format!("--metrics {address}"))?;
        let page = Arc::new(Page { figures, token, under_way: AtomicUsize::new(0) });
        let thread = std::thread::Builder::new().name("metrics".to_string());
        thread.spawn(move || accept(&listener, &page)).context("the thread of --metrics")?;
        Ok(Endpoint { address })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

fn accept(listener: &TcpListener, page: &Arc<Page>) {
    loop {
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(PAUSE);
            continue;
        };
        if page.under_way.fetch_add(1, Ordering::Relaxed) >= REQUESTS_MAX {
            page.under_way.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let served = page.clone();
        let thread = std::thread::Builder::new().name("metrics request".to_string());
        let started = thread.spawn(move || {
            // Whoever asked may be gone.
            drop(served.answer(stream));
            served.under_way.fetch_sub(1, Ordering::Relaxed);
        });
        if started.is_err() {
            page.under_way.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Page {
    fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        stream.set_write_timeout(Some(REQUEST_LIMIT))?;
        let answer = match request(&mut stream)? {
            Some(request) => self.respond(&request),
            None => response("431 Request Header Fields Too Large", "", "The request is too long.\n"),
        };
        stream.write_all(answer.as_bytes())?;
        stream.shutdown(std::net::Shutdown::Write)
    }

    /// The response to a request's head.
    fn respond(&self, request: &str) -> String {
        let mut lines = request.lines();
        let mut words = lines.next().unwrap_or_default().split(' ');
        let (method, path, version) = (words.next(), words.next(), words.next());
        if !version.is_some_and(|version| version.starts_with("HTTP/1.")) || words.next().is_some() {
            return response("400 Bad Request", "", "This is an HTTP/1.1 endpoint.\n");
        }
        if !self.admits(lines) {
            return response("401 Unauthorized", "WWW-Authenticate: Bearer\r\n", "A bearer token is needed.\n");
        }
        match (method, path.map(|path| path.split('?').next().unwrap_or(path))) {
            (Some("GET"), Some("/metrics")) => {
                let run = self.figures.lock().unwrap_or_else(PoisonError::into_inner).run();
                let kind = format!("Content-Type: {}\r\n", prometheus::CONTENT_TYPE);
                response("200 OK", &kind, &prometheus::text(&run))
            }
            (Some("GET"), _) => response("404 Not Found", "", "There is /metrics, and nothing else.\n"),
            _ => response("405 Method Not Allowed", "Allow: GET\r\n", "There is GET, and nothing else.\n"),
        }
    }

    /// Whether a request with these headers knows the token, if there is one.
    fn admits<'a>(&self, mut headers: impl Iterator<Item = &'a str>) -> bool {
        let Some(token) = &self.token else { return true };
        let given = headers.find_map(|header| {
            let (name, value) = header.split_once(':')?;
            let (scheme, given) = value.trim().split_once(' ')?;
            (name.eq_ignore_ascii_case("authorization") && scheme.eq_ignore_ascii_case("bearer")).then(|| given.trim())
        });
        given.is_some_and(|given| is_same(given.as_bytes(), token.as_bytes()))
    }
}

/// A request's head; none if it is too long.
fn request(stream: &mut TcpStream) -> std::io::Result<Option<String>> {
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

/// Takes as long wherever the two differ.
fn is_same(given: &[u8], token: &[u8]) -> bool {
    let differ = given.iter().zip(token).fold(0, |differ, (a, b)| differ | (a ^ b));
    given.len() == token.len() && differ == 0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use shardwise_journal::{Entry, Step, StepTraffic, VerbTraffic, What};

    use super::*;

    fn figures() -> Arc<Mutex<Figures>> {
        let mut figures = Figures::default();
        for step in 1..=3 {
            figures.add(&Entry::now(What::Step(Step { step, loss: f64::NAN, ..Step::default() })));
            let verb = VerbTraffic { verb: "all-gather".to_string(), calls: 2, bytes: 500, theory_bytes: 400 };
            figures.add(&Entry::now(What::Traffic(StepTraffic { step, steps: 1, verbs: vec![verb] })));
        }
        Arc::new(Mutex::new(figures))
    }

    fn ask(endpoint: &Endpoint, request: &str) -> String {
        let mut stream = TcpStream::connect(endpoint.address()).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn figures_are_served_and_nothing_else_is() {
        let endpoint = Endpoint::serve_with("0".parse().unwrap(), figures(), None).unwrap();
        assert!(endpoint.address().ip().is_loopback());
        let page = ask(&endpoint, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
        let (head, body) = page.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
        assert!(
            body.contains("\nshardwise_step 3\n") && body.contains("sent_bytes_total{verb=\"all-gather\"} 1500"),
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
    fn others_need_the_token() {
        let everywhere: Address = "0.0.0.0:0".parse().unwrap();
        for token in [None, Some("short".to_string())] {
            let error = Endpoint::serve_with(everywhere, figures(), token).err().unwrap();
            assert!(error.to_string().contains(TOKEN), "{error}");
        }
        let endpoint = Endpoint::serve_with(everywhere, figures(), Some("0123456789abcdef".to_string())).unwrap();
        let get = |header: &str| ask(&endpoint, &format!("GET /metrics HTTP/1.1\r\n{header}\r\n"));
        for header in ["", "Authorization: Bearer 0123456789abcdeg\r\n", "Authorization: Basic 0123456789abcdef\r\n"] {
            assert!(get(header).starts_with("HTTP/1.1 401 "), "{header}");
        }
        assert!(get("authorization: bearer 0123456789abcdef\r\n").starts_with("HTTP/1.1 200 "));
    }

    #[test]
    fn those_who_say_nothing_do_not_keep_others_out_for_good() {
        let endpoint = Endpoint::serve_with("0".parse().unwrap(), figures(), None).unwrap();
        let idle: Vec<TcpStream> = (0..50).map(|_| TcpStream::connect(endpoint.address()).unwrap()).collect();
        let started = Instant::now();
        loop {
            let mut stream = TcpStream::connect(endpoint.address()).unwrap();
            let mut answer = String::new();
            // It may be turned away while the others have their seconds.
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
    fn an_address_is_a_port_or_both() {
        assert_eq!("9464".parse::<Address>().unwrap().0.to_string(), "127.0.0.1:9464");
        assert_eq!("[::]:1".parse::<Address>().unwrap().0.to_string(), "[::]:1");
        for wrong in ["", ":9464", "70000", "host", "0.0.0.0"] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }
}
