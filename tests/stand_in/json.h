// A JSON document, as far as Triton's model configurations and an engine's config.json need one.

#pragma once

#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

class Json {
 public:
  enum class Kind { null, boolean, number, text, list, object };

  static Json parse(const std::string& text)
  {
    const char* position = text.c_str();
    Json value = parse_value(position);
    skip_space(position);
    if (*position != '\0') throw std::runtime_error("JSON: text after the document");
    return value;
  }

  // The member with a name; null if there is none.
  const Json& operator[](const std::string& name) const
  {
    static const Json missing;
    auto member = members_.find(name);
    return member == members_.end() ? missing : member->second;
  }

  bool has(const std::string& name) const { return members_.count(name) > 0; }
  bool is_null() const { return kind_ == Kind::null; }
  bool is_object() const { return kind_ == Kind::object; }
  bool as_bool(bool otherwise) const { return kind_ == Kind::boolean ? number_ != 0 : otherwise; }
  const std::string& as_text() const { return text_; }
  const std::vector<Json>& items() const { return items_; }

  // Triton writes 64-bit integers as text.
  long as_integer(long otherwise) const
  {
    if (kind_ == Kind::number) return static_cast<long>(number_);
    return kind_ == Kind::text && !text_.empty() ? std::atol(text_.c_str()) : otherwise;
  }

 private:
  static void skip_space(const char*& at)
  {
    while (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r') ++at;
  }

  static void expect(const char*& at, char wanted)
  {
    skip_space(at);
    if (*at != wanted) throw std::runtime_error(std::string("JSON: expected ") + wanted);
    ++at;
  }

  static bool take(const char*& at, char wanted)
  {
    skip_space(at);
    if (*at != wanted) return false;
    ++at;
    return true;
  }

  static Json parse_value(const char*& at)
  {
    skip_space(at);
    switch (*at) {
      case '{': return parse_object(at);
      case '[': return parse_list(at);
      case '"': {
        Json value(Kind::text);
        value.text_ = parse_text(at);
        return value;
      }
      default: return parse_word(at);
    }
  }

  static Json parse_object(const char*& at)
  {
    Json value(Kind::object);
    expect(at, '{');
    if (take(at, '}')) return value;
    do {
      skip_space(at);
      std::string name = parse_text(at);
      expect(at, ':');
      value.members_[name] = parse_value(at);
    } while (take(at, ','));
    expect(at, '}');
    return value;
  }

  static Json parse_list(const char*& at)
  {
    Json value(Kind::list);
    expect(at, '[');
    if (take(at, ']')) return value;
    do value.items_.push_back(parse_value(at));
    while (take(at, ','));
    expect(at, ']');
    return value;
  }

  static std::string parse_text(const char*& at)
  {
    expect(at, '"');
    std::string text;
    while (*at != '"') {
      if (*at == '\0') throw std::runtime_error("JSON: a text without an end");
      text += *at == '\\' ? parse_escape(at) : std::string(1, *at++);
    }
    ++at;
    return text;
  }

  static std::string parse_escape(const char*& at)
  {
    const char code = *++at;
    if (code == '\0') throw std::runtime_error("JSON: a text without an end");
    ++at;
    switch (code) {
      case 'n': return "\n";
      case 't': return "\t";
      case 'r': return "\r";
      case 'b': return "\b";
      case 'f': return "\f";
      case 'u': return parse_code_point(at);
      default: return std::string(1, code);
    }
  }

  static std::string parse_code_point(const char*& at)
  {
    if (strnlen(at, 4) < 4) throw std::runtime_error("JSON: half an escape");
    const std::string digits(at, 4);
    at += 4;
    const unsigned long point = std::stoul(digits, nullptr, 16);
    if (point < 0x80) return std::string(1, static_cast<char>(point));
    if (point < 0x800)
      return {static_cast<char>(0xC0 | point >> 6), static_cast<char>(0x80 | (point & 0x3F))};
    return {static_cast<char>(0xE0 | point >> 12), static_cast<char>(0x80 | (point >> 6 & 0x3F)),
            static_cast<char>(0x80 | (point & 0x3F))};
  }

  static Json parse_word(const char*& at)
  {
    for (const std::string word : {"true", "false", "null"}) {
      if (std::strncmp(at, word.c_str(), word.size()) == 0) {
        at += word.size();
        Json value(word == "null" ? Kind::null : Kind::boolean);
        value.number_ = word == "true";
        return value;
      }
    }
    char* end = nullptr;
    Json value(Kind::number);
    value.number_ = std::strtod(at, &end);
    if (end == at) throw std::runtime_error("JSON: no value");
    at = end;
    return value;
  }

 public:
  Json() = default;

 private:
  explicit Json(Kind kind) : kind_(kind) {}

  Kind kind_ = Kind::null;
  double number_ = 0;
  std::string text_;
  std::vector<Json> items_;
  std::map<std::string, Json> members_;
};
