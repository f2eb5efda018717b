//! As much of an S3 server as checkpoints need, on loopback: objects in memory, uploads in pieces, ranges, listings. Every
//! request must carry a signature (AWS Signature Version 4) by the one key this server knows, over just what arrived.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};

use ring::{digest, hmac};

pub const ACCESS_KEY: &str = "AKIATESTTESTTESTTEST";
pub const SECRET_KEY: &str = "secret/of+the/test+server";

/// Larger requests than these are no writer's of ours.
const BODY_BYTES_MAX: usize = 64 << 20;

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Vec<u8>>,
    /// Uploads in pieces that are under way.
    uploads: BTreeMap<String, BTreeMap<u32, Vec<u8>>>,
    uploads_begun: usize,
    pieces: usize,
    bytes_sent: usize,
    deleted: Vec<String>,
    refused: usize,
    /// Requests that are still answered.
    left: Option<usize>,
}

pub struct Server {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

/// A request whose signature was found good.
struct Request {
    method: String,
    /// Without the bucket.
    key: String,
    query: BTreeMap<String, String>,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

struct Answer {
    status: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Answer {
    fn of(status: &'static str, body: impl Into<Vec<u8>>) -> Answer {
        Answer { status, headers: Vec::new(), body: body.into() }
    }
}

impl Server {
    pub fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        // It ends with the process: nothing of it outlives a test.
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let shared = shared.clone();
                std::thread::spawn(move || serve(stream, &shared));
            }
        });
        Server { address, state }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no request panics")
    }

    pub fn keys(&self) -> Vec<String> {
        self.state().objects.keys().cloned().collect()
    }

    pub fn pieces(&self) -> usize {
        self.state().pieces
    }

    pub fn bytes_sent(&self) -> usize {
        self.state().bytes_sent
    }

    pub fn deleted(&self) -> Vec<String> {
        self.state().deleted.clone()
    }

    pub fn refused(&self) -> usize {
        self.state().refused
    }

    pub fn refuse_after(&self, requests: Option<usize>) {
        self.state().left = requests;
    }

    /// Changes one bit at the end of an object.
    pub fn damage(&self, key: &str) {
        let mut state = self.state();
        *state.objects.get_mut(key).expect("there").last_mut().expect("not empty") ^= 1;
    }
}

fn serve(stream: TcpStream, state: &Mutex<State>) {
    let mut writer = stream.try_clone().expect("a second handle");
    let mut reader = BufReader::new(stream);
    while let Some((request, signed)) = read(&mut reader) {
        let mut state = state.lock().expect("no request panics");
        let answers = state.left.is_none_or(|left| left > 0);
        state.left = state.left.map(|left| left.saturating_sub(1));
        let answer = if signed && answers {
            state.answer(&request)
        } else {
            state.refused += usize::from(!signed);
            let code = "<Error><Code>AccessDenied</Code></Error>";
            Answer::of("403 Forbidden", code)
        };
        state.bytes_sent += answer.body.len();
        drop(state);
        // A head has the length of what a body would have been, and none.
        let is_head = request.method == "HEAD";
        let length = answer.headers.iter().find(|(name, _)| *name == "content-length");
        let length = length.map_or(answer.body.len().to_string(), |(_, length)| length.clone());
        let mut head = format!("HTTP/1.1 {}\r\ncontent-length: {length}\r\n", answer.status);
        for (name, value) in answer.headers.iter().filter(|(name, _)| *name != "content-length") {
            head += &format!("{name}: {value}\r\n");
        }
        let body = if is_head { &[][..] } else { &answer.body };
        if writer.write_all((head + "\r\n").as_bytes()).and_then(|()| writer.write_all(body)).is_err() {
            return;
        }
    }
}

/// The next request, and whether it is signed by the key.
fn read(reader: &mut BufReader<TcpStream>) -> Option<(Request, bool)> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|count| *count > 0)?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim_end().split_once(':') {
            Some((name, value)) => headers.insert(name.to_ascii_lowercase(), value.trim().to_owned()),
            None => break,
        };
    }
    let length: usize = headers.get("content-length").map_or(Some(0), |length| length.parse().ok())?;
    assert!(length <= BODY_BYTES_MAX, "a body of {length} bytes");
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let raw: BTreeMap<String, String> = pairs
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let signed = is_signed(&method, path, &raw, &headers, &body).unwrap_or(false);
    let query = raw.into_iter().map(|(name, value)| (name, decoded(&value))).collect();
    let key = decoded(path).strip_prefix("/bucket").unwrap_or_default().trim_start_matches('/').to_owned();
    Some((Request { method, key, query, headers, body }, signed))
}

/// Works the signature out again, as the protocol's description says.
fn is_signed(
    method: &str,
    path: &str,
    query: &BTreeMap<String, String>,
    headers: &BTreeMap<String, String>,
    body: &[u8],
) -> Option<bool> {
    let fields = headers.get("authorization")?.strip_prefix("AWS4-HMAC-SHA256 ")?;
    let field =
        |name: &str| fields.split(',').find_map(|field| field.trim().strip_prefix(name)?.strip_prefix('='));
    let (credential, names, signature) = (field("Credential")?, field("SignedHeaders")?, field("Signature")?);
    let (key, scope) = credential.split_once('/')?;
    let content = headers.get("x-amz-content-sha256")?;
    let is_intact = *content == hex(digest::digest(&digest::SHA256, body).as_ref());
    let canonical_query: Vec<String> = query.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let signed: String =
        names.split(';').map(|name| format!("{name}:{}\n", headers.get(name).map_or("", |v| v))).collect();
    let request = format!("{method}\n{path}\n{}\n{signed}\n{names}\n{content}", canonical_query.join("&"));
    let hashed = hex(digest::digest(&digest::SHA256, request.as_bytes()).as_ref());
    let to_sign = format!("AWS4-HMAC-SHA256\n{}\n{scope}\n{hashed}", headers.get("x-amz-date")?);
    let sign = |key: &[u8], text: &str| hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes());
    let start = format!("AWS4{SECRET_KEY}").into_bytes();
    let signing = scope.split('/').fold(start, |key, word| sign(&key, word).as_ref().to_vec());
    let must_sign = ["host", "x-amz-content-sha256", "x-amz-date"];
    let covers = must_sign.iter().all(|name| names.split(';').any(|signed| signed == *name));
    Some(key == ACCESS_KEY && is_intact && covers && hex(sign(&signing, &to_sign).as_ref()) == signature)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn decoded(text: &str) -> String {
    let (mut bytes, mut out) = (text.bytes(), Vec::new());
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let digits: String = bytes.by_ref().take(2).map(char::from).collect();
                out.push(u8::from_str_radix(&digits, 16).expect("two digits"));
            }
            b'+' => out.push(b' '),
            byte => out.push(byte),
        }
    }
    String::from_utf8(out).expect("keys are text")
}

impl State {
    fn answer(&mut self, request: &Request) -> Answer {
        let Request { method, key, query, headers, body } = request;
        match (method.as_str(), query.get("uploadId")) {
            ("GET", _) if key.is_empty() => self.list(query),
            ("GET" | "HEAD", _) => self.get(key, headers.get("range")),
            ("POST", None) if query.contains_key("uploads") => {
                self.uploads_begun += 1;
                let id = format!("upload-{}", self.uploads_begun);
                self.uploads.insert(id.clone(), BTreeMap::new());
                Answer::of(
                    "200 OK",
                    format!(
                        "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
                    ),
                )
            }
            ("POST", None) if query.contains_key("delete") => self.delete_many(body),
            ("PUT", Some(id)) => {
                let number = query["partNumber"].parse().expect("a number");
                self.uploads.get_mut(id).expect("begun").insert(number, body.clone());
                self.pieces += 1;
                Answer { headers: vec![("etag", format!("\"{number}\""))], ..Answer::of("200 OK", "") }
            }
            ("POST", Some(id)) => {
                let pieces = self.uploads.remove(id).expect("begun");
                self.objects.insert(key.clone(), pieces.into_values().flatten().collect());
                Answer::of(
                    "200 OK",
                    "<CompleteMultipartUploadResult><ETag>\"whole\"</ETag></CompleteMultipartUploadResult>",
                )
            }
            ("DELETE", Some(id)) => {
                self.uploads.remove(id);
                Answer::of("204 No Content", "")
            }
            ("PUT", None) => {
                self.objects.insert(key.clone(), body.clone());
                Answer { headers: vec![("etag", "\"one\"".to_owned())], ..Answer::of("200 OK", "") }
            }
            ("DELETE", None) => {
                self.deleted.extend(self.objects.remove(key).map(|_| key.clone()));
                Answer::of("204 No Content", "")
            }
            _ => Answer::of("400 Bad Request", ""),
        }
    }

    fn get(&self, key: &str, range: Option<&String>) -> Answer {
        let Some(object) = self.objects.get(key) else {
            return Answer::of("404 Not Found", "<Error><Code>NoSuchKey</Code></Error>");
        };
        let mut headers = vec![
            ("etag", "\"one\"".to_owned()),
            ("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT".to_owned()),
        ];
        let Some(range) = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) else {
            return Answer { headers, ..Answer::of("200 OK", object.clone()) };
        };
        let (start, end): (usize, usize) =
            (range.0.parse().expect("a number"), range.1.parse().expect("a number"));
        let end = end.min(object.len() - 1);
        headers.push(("content-range", format!("bytes {start}-{end}/{}", object.len())));
        Answer { headers, ..Answer::of("206 Partial Content", &object[start..=end]) }
    }

    fn list(&self, query: &BTreeMap<String, String>) -> Answer {
        let prefix = query.get("prefix").map_or("", String::as_str);
        let found = self.objects.iter().filter(|(key, _)| key.starts_with(prefix));
        let contents: String = found
            .map(|(key, object)| {
                let size = object.len();
                format!("<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>\"one\"</ETag></Contents>")
            })
            .collect();
        Answer::of(
            "200 OK",
            format!("<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"),
        )
    }

    fn delete_many(&mut self, body: &[u8]) -> Answer {
        let text = String::from_utf8_lossy(body).into_owned();
        let keys = text.split("<Key>").skip(1).filter_map(|rest| rest.split_once("</Key>"));
        let mut deleted = String::new();
        for (key, _) in keys {
            self.deleted.extend(self.objects.remove(key).map(|_| key.to_owned()));
            deleted += &format!("<Deleted><Key>{key}</Key></Deleted>");
        }
        Answer::of("200 OK", format!("<DeleteResult>{deleted}</DeleteResult>"))
    }
}
