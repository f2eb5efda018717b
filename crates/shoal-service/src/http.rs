//! One request and its answer, over TLS or plain: what commands, joining workers and preemption pollers need of HTTP. Every
//! exchange has a limit in time and size.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::SendRequest;
use hyper::header::HeaderMap;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use crate::error::{Error, Result};
use crate::tls::CONTROLLER;

/// Host and port of a URL that has nothing else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub tls: bool,
    pub host: String,
    pub port: u16,
}

impl FromStr for Target {
    type Err = Error;

    fn from_str(url: &str) -> Result<Target> {
        let wrong = || Error::Url { url: url.to_owned() };
        let text = url.trim();
        let (tls, rest) = match (text.strip_prefix("https://"), text.strip_prefix("http://")) {
            (Some(rest), _) => (true, rest),
            (_, Some(rest)) => (false, rest),
            _ => return Err(wrong()),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = rest.rsplit_once(':').ok_or_else(wrong)?;
        let port = port.parse().map_err(|_| wrong())?;
        let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let plain = |host: &str| {
            !host.is_empty()
                && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-'))
        };
        let good = match inner {
            Some(inner) => inner.parse::<std::net::Ipv6Addr>().is_ok(),
            None => plain(host),
        };
        good.then(|| Target { tls, host: host.to_owned(), port }).ok_or_else(wrong)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(formatter, "{scheme}://{}:{}", self.host, self.port)
    }
}

impl Target {
    /// As a `Host` header has it.
    pub fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    async fn connect(&self) -> std::io::Result<TcpStream> {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let stream = TcpStream::connect((host, self.port)).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

/// What is said, and how long and how large the answer may be.
pub struct Call<'a> {
    pub method: &'a str,
    /// With its query.
    pub path: &'a str,
    pub headers: Vec<(&'a str, String)>,
    pub body: Vec<u8>,
    pub within: Duration,
    pub answer_bytes_max: usize,
}

pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

/// Why an exchange came to nothing. Both are about the target; which of the two matters to people.
#[derive(Debug)]
pub enum Failure {
    Unreachable(String),
    /// It is there, and is not whom the certificate has to be of.
    Stranger,
}

impl Failure {
    pub fn at(self, target: &Target) -> Error {
        match self {
            Failure::Unreachable(cause) => Error::Unreachable { url: target.to_string(), cause },
            Failure::Stranger => Error::OtherFleet { url: target.to_string() },
        }
    }
}

/// A connection to a controller or, without a configuration, to whoever speaks plainly.
pub enum Stream {
    Plain(TcpStream),
    Tls(Box<tokio_rustls::client::TlsStream<TcpStream>>),
}

pub async fn open(target: &Target, tls: Option<&Arc<ClientConfig>>) -> std::result::Result<Stream, Failure> {
    let stream = target.connect().await.map_err(|error| Failure::Unreachable(error.to_string()))?;
    let Some(tls) = tls else { return Ok(Stream::Plain(stream)) };
    let name = ServerName::try_from(CONTROLLER).expect("it is a name");
    let connected = TlsConnector::from(tls.clone()).connect(name, stream).await;
    let failed = |error: std::io::Error| {
        let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>());
        match cause {
            Some(rustls::Error::InvalidCertificate(_)) => Failure::Stranger,
            _ => Failure::Unreachable(error.to_string()),
        }
    };
    Ok(Stream::Tls(Box::new(connected.map_err(failed)?)))
}

/// One request over a connection of its own.
pub async fn exchange(
    target: &Target,
    tls: Option<&Arc<ClientConfig>>,
    call: Call<'_>,
) -> std::result::Result<Answer, Failure> {
    Ok(ask_on(None, target, tls, call).await?.0)
}

/// One request over a connection that is there, or over a new one. Gives the connection back, for the next.
pub async fn ask_on(
    line: Option<Line>,
    target: &Target,
    tls: Option<&Arc<ClientConfig>>,
    call: Call<'_>,
) -> std::result::Result<(Answer, Line), Failure> {
    let within = call.within;
    let asked = async {
        let mut line = match line {
            Some(line) => line,
            None => Line::open(target, tls).await?,
        };
        Ok((line.ask(target, call).await?, line))
    };
    let late = |_| Failure::Unreachable(format!("no answer within {} s", within.as_secs_f64()));
    tokio::time::timeout(within, asked).await.map_err(late)?
}

/// A connection on which one request follows the other.
pub struct Line {
    sender: SendRequest<Full<Bytes>>,
    connection: JoinHandle<hyper::Result<()>>,
}

impl Line {
    pub async fn open(
        target: &Target,
        tls: Option<&Arc<ClientConfig>>,
    ) -> std::result::Result<Line, Failure> {
        let stream = open(target, tls).await?;
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (sender, connection) = handshake.map_err(failed)?;
        Ok(Line { sender, connection: tokio::spawn(connection) })
    }

    pub async fn ask(&mut self, target: &Target, call: Call<'_>) -> std::result::Result<Answer, Failure> {
        self.sender.ready().await.map_err(failed)?;
        let mut request =
            Request::builder().method(call.method).uri(call.path).header("host", target.authority());
        for (name, value) in &call.headers {
            request = request.header(*name, value);
        }
        let request = request.body(Full::new(Bytes::from(call.body))).map_err(failed)?;
        let response: Response<_> = self.sender.send_request(request).await.map_err(failed)?;
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, call.answer_bytes_max).collect().await.map_err(failed)?;
        Ok(Answer { status: parts.status.as_u16(), headers: parts.headers, body: body.to_bytes().to_vec() })
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

fn failed(error: impl fmt::Display) -> Failure {
    Failure::Unreachable(error.to_string())
}

/// For those who have no runtime: commands and pollers, which do one thing at a time.
pub fn block_on<T>(future: impl Future<Output = T>) -> std::io::Result<T> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(future))
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut tokio::io::ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Stream::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(context),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_a_scheme_a_host_and_a_port() {
        for good in ["https://127.0.0.1:7700", "http://[::1]:80/", "https://fleet.example:1"] {
            assert_eq!(good.parse::<Target>().expect(good).to_string(), good.trim_end_matches('/'));
        }
        for bad in [
            "",
            "127.0.0.1:7700",
            "https://h",
            "https://h:x",
            "https://h:1/path",
            "https://a@h:1",
            "ftp://h:1",
        ] {
            assert!(bad.parse::<Target>().is_err(), "{bad}");
        }
    }
}
